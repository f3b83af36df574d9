"""The recorded past under other algorithms. Pure: the events are the clock, nothing is read but through ``Record``.

Groups are opened, end, are judged and batches are asked for at the moments at which they were in the record. What is
chosen at each of these moments is asked of the pipeline anew:

    admitted   Curate.next; the recorded group of that task made nearest in time is played there, at that moment's
               versions, each once. There is none: it was never made
    ended      Credit, Keep, Curate.observe; the staleness sweep and the surplus rule
    cut        Select; what cannot be filled waits until it can
    committed  the step, unless the batch has no signal

With the run's own algorithms every choice is the recorded one, so that the result is the recorded past. What was never
made is unknown: ``unmade="lost"`` takes it for a group that is dropped, ``unmade="useful"`` for one with a signal. The
truth lies between. Neither is shown to Curate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from astraflow.algorithms.base import GroupSummary, ReadyGroup, Replay, StoredGroup
from astraflow.algorithms.curate.pool import SUPERVISED
from astraflow.algorithms.curate.rewards import has_signal
from astraflow.dataflow.leasing import check_admission
from astraflow.dataflow.retelling import Told
from astraflow.dataflow.settings import RunSpec
from astraflow.dataflow.settle import Verdict, samples_of, settle
from astraflow.run.replay.record import Record
from astraflow.run.replay.slots import Cut, Slot, Standing, Stock, shifted
from astraflow.types import Array, Episode

NEVER_MADE = "never_made"
Unmade = Literal["lost", "useful"]


class Rerun:
    """``spec.pipeline`` must be in its first state."""

    def __init__(self, spec: RunSpec, record: Record, *, unmade: Unmade = "lost") -> None:
        self.spec = spec
        self.record = record
        self.slots: dict[int, Slot] = {}
        self.cuts: dict[int, Cut] = {}
        self.versions = dict.fromkeys(spec.policies, 0)
        self.verdicts: dict[tuple[int, str], str] = {}
        """(group, policy) → ``kept``, ``stale`` or why it was dropped, when it was judged."""
        self.ages: dict[int, list[int]] = {}
        """Batch → age at use of its fresh samples."""
        self.without_task = 0
        """Moments at which Curate had no task."""
        self._unmade = unmade
        self._recorded = dict.fromkeys(spec.policies, 0)
        self._stock = Stock(record.groups)
        self._replays = isinstance(spec.pipeline.select, Replay)
        self._waiting: list[Cut] = []
        self._where: dict[tuple[str, str], dict[int, Slot]] = {}
        """(policy, state) → its slots."""

    def run(self) -> Rerun:
        for event in self.record.events():
            step = getattr(self, f"_on_{event.kind}", None)
            if step is not None:
                step(event)
        return self

    # ── groups ──

    def _on_admitted(self, event: Told) -> None:
        group = _number(event.group)
        if group not in self.record.groups:  # an evaluation
            return
        curate = self.spec.pipeline.curate
        admission = curate.next()
        if admission is None:
            self.without_task += 1
            return
        check_admission(admission, f"{type(curate).__name__}.next")
        size = 1 if admission.task.workflow == SUPERVISED else admission.episodes
        self.slots[group] = Slot(
            group=group,
            task=admission.task,
            size=size,
            content=self._stock.take(admission.task, size, near=group),
            ahead={name: self.versions[name] - self._recorded[name] for name in self.versions},
        )
        for policy in self.spec.trainable:
            self.slots[group].standings[policy] = Standing()
            self._in(policy, "open")[group] = self.slots[group]

    def _in(self, policy: str, state: str) -> dict[int, Slot]:
        return self._where.setdefault((policy, state), {})

    def _move(self, slot: Slot, policy: str, state: str, reason: str | None = None) -> None:
        standing = slot.standings[policy]
        self._in(policy, standing.state).pop(slot.group)
        self._in(policy, state)[slot.group] = slot
        standing.state, standing.reason = state, reason

    def _on_ready(self, event: Told) -> None:
        slot = self.slots.get(_number(event.group))
        if slot is not None:
            slot.arrival = int(event.data["arrival"])
            for policy in slot.standings:
                self._move(slot, policy, "ready")

    def _on_judged(self, event: Told) -> None:
        """The first word on a group that has ended; a later one (surplus, stale) follows from the rules here."""
        slot = self.slots.get(_number(event.group))
        if slot is None or slot.settled:
            return
        slot.settled = True
        if slot.arrival is None:
            for policy in slot.standings:  # cancelled before it ended
                self._move(slot, policy, "stale")
                self.verdicts[slot.group, policy] = "stale"
            return
        if slot.content is None:
            self._settle_unmade(slot)
        else:
            self._settle(slot, slot.content)
        for policy in self.spec.trainable:
            self._sweep(policy)
            self._drop_surplus(policy)
        self._fill_waiting()

    _on_kept = _on_dropped = _on_stale = _on_judged

    def _settle(self, slot: Slot, content: int) -> None:
        pipeline = self.spec.pipeline
        by = self._shift(slot, content)
        episodes = shifted(self.record.episodes(content)[: slot.size], by)
        assert slot.arrival is not None
        verdicts = settle(
            pipeline,
            group=slot.group,
            task=slot.task,
            size=slot.size,
            episodes=episodes,
            arrival=slot.arrival,
            policies={name: policy.trainable for name, policy in self.spec.policies.items()},
            min_group=self.spec.limits.counted_members(slot.size),
            versions=self.versions,
        )
        for verdict in verdicts.values():
            pipeline.curate.observe(verdict.summary)
        for policy in self.spec.trainable:
            self._judge(slot, policy, verdicts[policy], episodes)

    def _shift(self, slot: Slot, content: int) -> dict[str, int]:
        """So that the content was sampled when the slot's own group was, by the version current in the rerun."""
        here, there = self.record.groups[slot.group].places, self.record.groups[content].places
        by = {}
        for policy in self.spec.trainable:
            at, was = here[policy].min_version, there[policy].min_version
            by[policy] = slot.ahead[policy] + (0 if at is None or was is None else at - was)
        return by

    def _judge(self, slot: Slot, policy: str, verdict: Verdict, episodes: list[Episode | None]) -> None:
        standing, summary = slot.standings[policy], verdict.summary
        standing.masked = {each.sample_id: each.masked for each in verdict.samples if each.masked is not None}
        found = [ref for ref in samples_of(slot.group, episodes, policy) if ref.sample_id not in standing.masked]
        standing.min_version, standing.fresh_version = summary.min_version, verdict.newest
        if self._replays:
            standing.units, standing.advantages = summary.units, verdict.advantages
        standing.trainable = {ref.sample_id: ref.sample.min_version for ref in found}
        unmasked = np.array([each not in standing.masked for each in summary.units.sample_id], np.bool_)
        standing.signal, standing.trained_signal = _signal(summary), _signal(_only(summary, unmasked))
        standing.trains = bool(verdict.advantages[unmasked].any()) or any(ref.supervised for ref in found)
        word = verdict.reason or ("stale" if self._is_stale(policy, verdict.newest) else "kept")
        self.verdicts[slot.group, policy] = word
        self._move(slot, policy, word if verdict.reason is None else "dropped", verdict.reason)

    def _settle_unmade(self, slot: Slot) -> None:
        for policy, standing in slot.standings.items():
            if self._unmade == "lost":
                self._move(slot, policy, "dropped", NEVER_MADE)
                self.verdicts[slot.group, policy] = NEVER_MADE
                continue
            at = self.record.groups[slot.group].places[policy].min_version
            version = max(0, slot.ahead[policy] + (self._recorded[policy] if at is None else at))
            standing.min_version = standing.fresh_version = version
            standing.trainable = {f"{slot.group}/{idx}/{NEVER_MADE}/0": version for idx in range(slot.size)}
            standing.signal = standing.trained_signal = standing.trains = True
            standing.advantages = np.ones(slot.size, np.float32)
            self._move(slot, policy, "stale" if self._is_stale(policy, version) else "kept")
            self.verdicts[slot.group, policy] = standing.state

    # ── the kept queue ──

    def _is_stale(self, policy: str, fresh: int | None) -> bool:
        bound = self.spec.policies[policy].max_staleness
        return fresh is not None and self.versions[policy] - fresh > bound

    def _kept(self, policy: str) -> list[Slot]:
        """In the order of admission."""
        kept = self._in(policy, "kept")
        return [kept[group] for group in sorted(kept)]

    def _sweep(self, policy: str) -> None:
        for slot in self._kept(policy):
            if self._is_stale(policy, slot.standings[policy].fresh_version):
                self._move(slot, policy, "stale")

    def _drop_surplus(self, policy: str) -> None:
        def age(slot: Slot) -> tuple[bool, int, int]:
            oldest = slot.standings[policy].min_version
            return oldest is None, oldest or 0, slot.arrival or 0

        kept = sorted(self._kept(policy), key=age)
        for slot in kept[: max(0, len(kept) - self.spec.policies[policy].room)]:
            self._move(slot, policy, "dropped", "surplus")

    # ── batches ──

    def _on_cut(self, event: Told) -> None:
        policy, batch = str(event.policy), _number(event.batch)
        recorded = tuple(event.data["groups"])
        whole = self.spec.policies[policy].groups_per_batch
        cut = self.cuts[batch] = Cut(
            batch=batch,
            policy=policy,
            need=min(whole, len(recorded)),
            recorded=recorded,
            windowed=len(recorded) >= whole,
        )
        self._waiting.append(cut)
        self._fill_waiting()

    def _fill_waiting(self) -> None:
        """In order: a trainer asks for one batch after the other."""
        blocked: set[str] = set()
        for cut in list(self._waiting):
            if cut.policy in blocked or not self._fill(cut):
                blocked.add(cut.policy)
            else:
                self._waiting.remove(cut)

    def _fill(self, cut: Cut) -> bool:
        policy, select = cut.policy, self.spec.pipeline.select
        self._sweep(policy)
        ready = [
            ReadyGroup(group=slot.group, min_version=slot.standings[policy].min_version, arrival=slot.arrival or 0)
            for slot in self._kept(policy)
        ]
        still = self._in(policy, "open").keys() | self._in(policy, "ready").keys()
        oldest = min(still, default=None) if cut.windowed else None
        again: list[int] = []
        if isinstance(select, Replay):
            stored = self._stored(policy)
            fresh, again = select.pick_with(ready, stored, policy=policy, need=cut.need, oldest_open=oldest)
        else:
            fresh = select.pick(ready, need=cut.need, oldest_open=oldest)
        if not fresh:
            return False
        for group in fresh:
            self._move(self.slots[group], policy, "batched")
            oldest_trained = self.versions[policy] - self.spec.policies[policy].max_staleness
            self.slots[group].standings[policy].mask_stale(oldest_trained)
        self._credit_batch(policy, fresh)
        cut.groups = (*((group, 0) for group in fresh), *((group, self._use(group, policy)) for group in again))
        cut.state = "cut"
        if cut.due is not None:
            self._end(cut, cut.due)
        return True

    def _use(self, group: int, policy: str) -> int:
        standing = self.slots[group].standings[policy]
        standing.uses += 1
        return standing.uses - 1

    def _credit_batch(self, policy: str, fresh: list[int]) -> None:
        """What a replay goes by: the advantages that a group was trained with."""
        found = [self.slots[group].standings[policy] for group in fresh]
        credited = [each for each in found if each.units is not None and len(each.units)]
        if not credited:
            return
        tables = [each.units for each in credited if each.units is not None]
        answers = self.spec.pipeline.credit.batch(tables, [each.advantages for each in credited])
        for standing, answer in zip(credited, answers, strict=True):
            standing.advantages = answer

    def _stored(self, policy: str) -> list[StoredGroup]:
        version, bound = self.versions[policy], self.spec.policies[policy].max_staleness
        stored = [
            StoredGroup(
                group=slot.group,
                age=max(0, version - standing.fresh_version),
                arrival=slot.arrival or 0,
                uses=standing.uses,
                advantage=float(np.abs(standing.advantages).mean()),
            )
            for slot in self._in(policy, "trained").values()
            if (standing := slot.standings[policy]).fresh_version is not None
            and version - standing.fresh_version <= bound
            and len(standing.advantages)
        ]
        return sorted(stored, key=lambda each: each.arrival)

    def _on_committed(self, event: Told) -> None:
        self._recorded[str(event.policy)] = int(event.data["version"])
        self._end(self.cuts[_number(event.batch)], "committed")

    _on_committed_again = _on_committed

    def _on_batch_dropped(self, event: Told) -> None:
        self._end(self.cuts[_number(event.batch)], str(event.data["reason"]))

    def _end(self, cut: Cut, due: str) -> None:
        """As the record did with the same groups; with others, a step is made if there is something to learn from."""
        cut.due = due
        if cut.state == "waiting":
            return
        if not cut.same and due != "rolled_back":
            trains = any(self.slots[group].standings[cut.policy].trains for group, _ in cut.groups)
            due = "committed" if trains else "no_signal"
        base = self.versions[cut.policy]
        cut.state, cut.reason = ("committed", None) if due == "committed" else ("dropped", due)
        self._count(cut.policy)
        self.ages.pop(cut.batch, None)
        for group, use in cut.groups:
            if use:
                continue
            slot = self.slots[group]
            standing = slot.standings[cut.policy]
            self._move(slot, cut.policy, "trained" if due == "committed" else "dropped", cut.reason)
            standing.version = base + 1 if due == "committed" else None
            if due == "committed":
                versions = [version for version in standing.trainable.values() if version is not None]
                self.ages.setdefault(cut.batch, []).extend(max(0, base - version) for version in versions)
        self._sweep(cut.policy)

    def _on_undone(self, event: Told) -> None:
        """A trainer went back further: its batches come again, same groups."""
        cut = self.cuts[_number(event.batch)]
        cut.due = None
        if cut.state != "committed":
            return
        cut.state = "cut"
        self.ages.pop(cut.batch, None)
        for group, use in cut.groups:
            if not use:
                self._move(self.slots[group], cut.policy, "batched")
                self.slots[group].standings[cut.policy].version = None
        self._count(cut.policy)

    def _count(self, policy: str) -> None:
        self.versions[policy] = sum(cut.policy == policy and cut.state == "committed" for cut in self.cuts.values())

    def _on_resumed(self, event: Told) -> None:
        self._recorded[str(event.policy)] = int(event.data["version"])

    _on_rolled_back = _on_resumed


def _signal(summary: GroupSummary) -> bool | None:
    return has_signal(summary) if summary.units.counts.any() else None


def _only(summary: GroupSummary, units: Array) -> GroupSummary:
    """``units``: bool [U], those that count if they did."""
    return replace(summary, units=replace(summary.units, counts=summary.units.counts & units))


def _number(value: int | None) -> int:
    assert value is not None
    return value
