"""States that the run can never leave by itself become an error with the counts, never a wait."""

from __future__ import annotations

from astraflow.dataflow.components import ROLLOUT
from astraflow.dataflow.ledger import USER_CODE, Ledger


class Watchdog:
    def __init__(self, ledger: Ledger, now: float) -> None:
        self._ledger = ledger
        self._served_at = now

    def look(self, now: float) -> bool:
        """True if the run was stopped."""
        ledger = self._ledger
        if ledger.state != "running":
            return False
        self._nobody_serves(now)
        self._tasks_used_up(now)
        return ledger.state != "running"

    def _nobody_serves(self, now: float) -> None:
        ledger = self._ledger
        workers = [each for each in ledger.components.all() if each.component == ROLLOUT]
        alive = [each for each in workers if each.state == "alive"]
        needed = ledger.needed_policies()
        # One without an engine counts: whether supervised tasks are all that is left, only Curate knows.
        if not self._episodes_wanted() or any(needed <= set(each.policies) or not each.policies for each in alive):
            self._served_at = now
            return
        limit = ledger.spec.limits.starved_after_s
        if now - self._served_at >= limit:
            found = ", ".join(f"{each.name} ({each.state}: {'+'.join(each.policies) or 'none'})" for each in workers)
            ledger.stop(
                now,
                "Starved",
                f"no worker served {sorted(needed)} for {now - self._served_at:.0f} s (limit {limit:g} s); "
                f"workers: {found or 'none'}",
            )

    def _episodes_wanted(self) -> bool:
        """False while trainers have all that they need."""
        rooms = self._ledger.groups.rooms().values()
        return bool(self._ledger.evals.open) or any(room.steps_left and not room.batched_groups for room in rooms)

    def _tasks_used_up(self, now: float) -> None:
        ledger = self._ledger
        if not ledger.exhausted:
            return
        for policy, room in ledger.groups.rooms().items():
            if room.steps_left and not room.open_groups and not room.batched_groups:
                short = room.kept_groups < room.groups_per_batch
                if short:
                    ledger.stop(
                        now,
                        "Starved",
                        f"the tasks are used up: policy {policy} has {room.kept_groups} kept groups of the "
                        f"{room.groups_per_batch} that a batch needs, and {room.steps_left} steps to go",
                    )
                    return

    def first_failures(self, now: float) -> None:
        """A run whose first episodes all fail in user code will not get better."""
        store, limit = self._ledger.store, self._ledger.spec.limits.first_failures
        if store.counter("episodes_done"):
            return
        failed = sum(store.counter(f"failed/{kind}") for kind in USER_CODE)
        if failed >= limit:
            row = store.one("SELECT error FROM episodes WHERE error IS NOT NULL ORDER BY group_id, idx LIMIT 1")
            self._ledger.stop(
                now,
                "RunFailed",
                f"the first {int(failed)} episodes all failed in user code, first: {row[0] if row else 'unknown'}",
            )
