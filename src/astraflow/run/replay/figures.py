"""A rerun and the record in the same figures, and whether their decisions are the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from astraflow.dataflow.settings import RunSpec
from astraflow.run.replay.record import Record
from astraflow.run.replay.rerun import Rerun


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Of one policy. Shares are of groups in which something was scored."""

    steps: int
    groups: int
    """Opened."""
    episodes: int
    """Of the groups that were opened."""
    kept: int
    """Groups that were found fit for training when they were judged; some of them are never trained."""
    episodes_trained: int
    """Of the groups that were trained."""
    never_made: int
    """Episodes that were asked for and are in no recorded group."""
    with_signal: float | None
    """Share of groups whose rewards differ; None: nothing was scored."""
    trained_with_signal: float | None
    """Share of the trained groups whose rewards differ."""
    replayed: int
    """Times that a group came again."""
    stale: int
    """Groups that became too old to be trained."""
    staleness: float | None
    """Mean age at use of the trained samples, in versions."""
    staleness_max: int | None
    dropped: dict[str, int]
    """Reason → groups."""

    @property
    def episodes_per_step(self) -> float | None:
        return self.episodes / self.steps if self.steps else None

    @property
    def episodes_per_kept(self) -> float | None:
        """What a group fit for training costs, whatever the pace of the trainers was."""
        return self.episodes / self.kept if self.kept else None

    def as_json(self) -> dict[str, Any]:
        more = {"episodes_per_step": self.episodes_per_step, "episodes_per_kept": self.episodes_per_kept}
        return {**asdict(self), **more}


def happened(record: Record, spec: RunSpec, signals: dict[int, dict[str, bool | None]]) -> dict[str, Figures]:
    """What really was, from the tables. ``signals``: of every recorded group, see ``signals_of``."""
    replayed: Counter[str] = Counter()
    verdicts = recorded_verdicts(record)
    versions = dict.fromkeys(spec.policies, 0)
    for event in record.events():
        if event.kind == "cut":
            replayed[str(event.policy)] += len(event.data.get("replayed", ()))
        if event.kind in ("committed", "committed_again", "resumed", "rolled_back"):
            versions[str(event.policy)] = int(event.data["version"])
    return {
        policy: _figures(
            [
                (group.size, place.state, place.reason, signals.get(group.group, {}).get(policy))
                for group in record.groups.values()
                for place in [group.places[policy]]
            ],
            steps=versions[policy],
            kept=sum(word == "kept" for (_, name), word in verdicts.items() if name == policy),
            ages=record.ages.get(policy, []),
            replayed=replayed[policy],
            never_made=0,
        )
        for policy in spec.trainable
    }


def signals_of(rerun: Rerun) -> dict[int, dict[str, bool | None]]:
    """Recorded group → policy → whether its rewards differ; of the groups that were played in the rerun."""
    return {
        slot.content: {policy: standing.signal for policy, standing in slot.standings.items()}
        for slot in rerun.slots.values()
        if slot.content is not None
    }


def figures_of(rerun: Rerun) -> dict[str, Figures]:
    return {
        policy: _figures(
            [
                (slot.size, standing.state, standing.reason, standing.signal)
                for slot in rerun.slots.values()
                for standing in [slot.standings[policy]]
            ],
            steps=rerun.versions[policy],
            kept=sum(word == "kept" for (_, name), word in rerun.verdicts.items() if name == policy),
            ages=[age for cut, ages in rerun.ages.items() if rerun.cuts[cut].policy == policy for age in ages],
            replayed=sum(use > 0 for cut in rerun.cuts.values() if cut.policy == policy for _, use in cut.groups),
            never_made=sum(slot.size for slot in rerun.slots.values() if slot.content is None),
        )
        for policy in rerun.spec.trainable
    }


def _figures(
    groups: list[tuple[int, str, str | None, bool | None]],
    *,
    steps: int,
    kept: int,
    ages: list[int],
    replayed: int,
    never_made: int,
) -> Figures:
    """``groups``: (size, state, reason, signal)"""
    judged = [signal for _, _, _, signal in groups if signal is not None]
    trained = [signal for _, state, _, signal in groups if signal is not None and state == "trained"]
    return Figures(
        steps=steps,
        kept=kept,
        groups=len(groups),
        episodes=sum(size for size, _, _, _ in groups),
        episodes_trained=sum(size for size, state, _, _ in groups if state == "trained"),
        never_made=never_made,
        with_signal=sum(judged) / len(judged) if judged else None,
        trained_with_signal=sum(trained) / len(trained) if trained else None,
        replayed=replayed,
        stale=sum(state == "stale" for _, state, _, _ in groups),
        staleness=sum(ages) / len(ages) if ages else None,
        staleness_max=max(ages, default=None),
        dropped=dict(
            sorted(Counter(reason or "unknown" for _, state, reason, _ in groups if state == "dropped").items())
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Decisions of a rerun beside those of the record."""

    admissions: int
    verdicts: int
    batches: int
    differences: tuple[str, ...]

    @property
    def same(self) -> bool:
        return not self.differences


def compared(rerun: Rerun) -> Comparison:
    """Every task that was chosen, every verdict, the groups of every batch in their order, and where all ended."""
    record = rerun.record
    verdicts = recorded_verdicts(record)
    differences = [*_of_tasks(rerun), *_of_verdicts(rerun, verdicts), *_of_batches(rerun), *_of_ends(rerun)]
    return Comparison(
        admissions=len(record.groups),
        verdicts=len(verdicts),
        batches=len(rerun.cuts),
        differences=tuple(differences),
    )


def recorded_verdicts(record: Record) -> dict[tuple[int, str], str]:
    """(group, policy) → the first word on it: ``kept``, ``stale`` or why it was dropped."""
    found: dict[tuple[int, str], str] = {}
    for event in record.events():
        if event.kind in ("kept", "dropped", "stale") and event.group in record.groups:
            word = str(event.data["reason"]) if event.kind == "dropped" else event.kind
            found.setdefault((event.group, str(event.policy)), word)
    return found


def _of_tasks(rerun: Rerun) -> Iterator[str]:
    for group in rerun.record.groups.values():
        slot = rerun.slots.get(group.group)
        there = f"{group.size} episodes of {group.task.key}"
        here = "no task" if slot is None else f"{slot.size} episodes of {slot.task.key}"
        if here != there or (slot is not None and slot.content != group.group):
            yield f"group {group.group}: {there}, now {here}"


def _of_verdicts(rerun: Rerun, recorded: dict[tuple[int, str], str]) -> Iterator[str]:
    for group, policy in sorted(recorded.keys() | rerun.verdicts.keys()):
        before, now = recorded.get((group, policy)), rerun.verdicts.get((group, policy))
        if before != now:
            yield f"group {group} for {policy}: {before}, now {now}"


def _of_batches(rerun: Rerun) -> Iterator[str]:
    for cut in rerun.cuts.values():
        if not cut.same:
            now = [group for group, _ in cut.groups] or "not filled"
            yield f"batch {cut.batch} of {cut.policy}: groups {list(cut.recorded)}, now {now}"


def _of_ends(rerun: Rerun) -> Iterator[str]:
    for group in rerun.record.groups.values():
        slot = rerun.slots.get(group.group)
        for policy, place in group.places.items() if slot is not None else ():
            standing = slot.standings[policy] if slot is not None else None
            before = (place.state, place.reason, place.version)
            now = None if standing is None else (standing.state, standing.reason, standing.version)
            if before != now:
                yield f"group {group.group} for {policy} ended as {_words(before)}, now {_words(now)}"


def _words(end: tuple[str, str | None, int | None] | None) -> str:
    return "nothing" if end is None else " ".join(str(part) for part in end if part is not None)
