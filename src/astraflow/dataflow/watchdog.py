"""States that the run can never leave by itself become a diagnosis and an action, never a silent wait."""

from __future__ import annotations

from collections.abc import Mapping

from astraflow.algorithms.base import PolicyRoom
from astraflow.dataflow.components import ROLLOUT
from astraflow.dataflow.diagnosis import serves, workers_words
from astraflow.dataflow.episodes import SUPERVISED_DONE
from astraflow.dataflow.ledger import FORGIVEN, Ledger
from astraflow.dataflow.starving import NOBODY, chosen, served, starve, starve_unchosen, starve_untrained, trained
from astraflow.dataflow.sweeps import HEARD_AGAIN

Rooms = Mapping[str, PolicyRoom]
WITH_TRAINER = (
    "SELECT t.policy FROM trainers t JOIN components c ON c.component = 'trainer' AND c.name = t.name "
    "WHERE c.state = 'alive'"
)


class Watchdog:
    def __init__(self, ledger: Ledger, now: float) -> None:
        self._ledger = ledger
        self._served_at = now
        self._trained_at: dict[str, float] = {}
        """By policy, when it was last seen to have a trainer, or no need of one."""
        self._chosen_at: dict[str, float] = {}
        """By policy, when Select was last seen to have chosen, or to have something to wait for."""

    def look(self, now: float) -> bool:
        """True if something was done: whoever waits must ask again."""
        ledger = self._ledger
        if ledger.state != "running":
            self._chosen_at.clear()
            return False
        rooms = ledger.groups.rooms()
        return (
            self._nobody_serves(now, rooms)
            or self._nobody_trains(now, rooms)
            or self._none_chosen(now, rooms)
            or self._tasks_used_up(now, rooms)
        )

    def _nobody_trains(self, now: float, rooms: Rooms) -> bool:
        """A policy has a whole batch, and its trainer is dead or never came."""
        ledger, acted = self._ledger, False
        alive = {policy for (policy,) in ledger.store.all(WITH_TRAINER)}
        for policy, room in rooms.items():
            waits = room.batched_groups or room.kept_groups >= room.groups_per_batch
            if not room.steps_left or not waits or policy in alive:
                self._trained_at[policy] = now
                trained(ledger, policy)
            elif for_s := self._overdue(self._trained_at, policy, now):
                acted = True
                starve_untrained(ledger, now, policy, for_s)
        return acted

    def _none_chosen(self, now: float, rooms: Rooms) -> bool:
        """Select takes none of a whole batch, and no open group is there that it could hold back for. Where Pace holds
        a policy back, Select is not asked."""
        ledger, acted = self._ledger, False
        alive = {policy for (policy,) in ledger.store.all(WITH_TRAINER)} if ledger.unchosen else set()
        for policy in rooms:
            unchosen = ledger.unchosen.get(policy)
            if unchosen is None or unchosen.waits or policy not in alive:
                self._chosen_at[policy] = now
                chosen(ledger, policy)
            elif for_s := self._overdue(self._chosen_at, policy, now):
                acted = True
                starve_unchosen(ledger, now, policy, for_s)
        return acted

    def _overdue(self, well_at: dict[str, float], policy: str, now: float) -> float:
        """For how long it has lasted, once that is the limit, and then anew from here; 0 before. ``well_at``: by
        policy, when all was well. Time in which dataflow did not look is nobody's fault."""
        ledger = self._ledger
        for_s = now - max(well_at.setdefault(policy, now), float(ledger.store.get(HEARD_AGAIN) or 0.0))
        if for_s < ledger.spec.limits.starved_after_s:
            return 0.0
        well_at[policy] = now
        return for_s

    def _nobody_serves(self, now: float, rooms: Rooms) -> bool:
        ledger = self._ledger
        workers = [each for each in ledger.components.all() if each.component == ROLLOUT]
        if not self._episodes_wanted(rooms) or any(serves(ledger, each) for each in workers):
            self._served_at = now
            served(ledger)
            return False
        limit = ledger.spec.limits.starved_after_s
        # While dataflow was stopped, no worker could have joined: that time is nobody's fault.
        self._served_at = max(self._served_at, float(ledger.store.get(HEARD_AGAIN) or 0.0))
        if now - self._served_at < limit:
            return False
        cause = f"{NOBODY} for {now - self._served_at:.0f} s (limit {limit:g} s)"
        self._served_at = now
        action = ledger.spec.limits.when_starved
        waiting = [policy for policy, room in rooms.items() if room.steps_left]
        if not waiting and action != "wait":
            what = f"the evaluation of policy {ledger.spec.evaluated} is not played"
            ledger.stop(now, "Starved", f"{what}: {cause}; {workers_words(ledger, now)}")
        # As long as one policy can be fed with what is kept, the run goes on.
        fed = [policy for policy in waiting if rooms[policy].kept_groups] if action == "smaller_batch" else []
        for policy in fed or waiting:
            if starve(ledger, now, policy, cause):
                break
        return True

    def _episodes_wanted(self, rooms: Rooms) -> bool:
        """False while trainers have all that they need."""
        return bool(self._ledger.evals.open) or any(
            room.steps_left and not room.batched_groups for room in rooms.values()
        )

    def _tasks_used_up(self, now: float, rooms: Rooms) -> bool:
        ledger = self._ledger
        if not ledger.exhausted:
            return False
        for policy, room in rooms.items():
            short = room.kept_groups < room.groups_per_batch
            if room.steps_left and not room.open_groups and not room.batched_groups and short:
                cause = (
                    f"the tasks are used up: {room.kept_groups} kept groups of the {room.groups_per_batch} that a "
                    f"batch needs, and {room.steps_left} steps to go"
                )
                starve(ledger, now, policy, cause, hopeless=True)
                return True
        return False

    def first_failures(self, now: float) -> None:
        """A run whose first episodes all fail in user code will not get better. Supervised ones run none of it."""
        store, limit = self._ledger.store, self._ledger.spec.limits.first_failures
        if store.counter("episodes_done") > store.counter(SUPERVISED_DONE):
            return
        failed = self._ledger.user_failures - int(store.get(FORGIVEN) or 0)
        if failed >= limit:
            row = store.one("SELECT error FROM episodes WHERE error IS NOT NULL ORDER BY group_id, idx LIMIT 1")
            first = row[0] if row else "unknown"
            words = f"the first {failed} episodes all failed in user code or by their time limit, first: {first}"
            self._ledger.stop(now, "RunFailed", f"{words}; mend that first: gone on with as it is, it comes again")
