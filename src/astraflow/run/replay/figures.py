"""A rerun and the record in the same figures, and whether their decisions are the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from astraflow.dataflow.cut import STALE
from astraflow.dataflow.settings import RunSpec
from astraflow.run.replay.record import Record, RecordedGroup
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
    """Those of which a sample took a gradient."""
    never_made: int
    """Episodes that were asked for and are in no recorded group."""
    with_signal: float | None
    """Share of groups whose rewards differ; None: nothing was scored."""
    trained_with_signal: float | None
    """Share of the trained groups whose rewards differ among the samples that are not masked."""
    replayed: int
    """Times that a group came again."""
    stale: int
    """Groups that became too old to be trained."""
    staleness: float | None
    """Mean age at use of the trained samples, in versions."""
    staleness_max: int | None
    dropped: dict[str, int]
    """Reason → groups."""
    masked: dict[str, int] = field(default_factory=dict)
    """Reason → samples of trained groups that took no gradient."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """One group for one policy."""

    size: int
    state: str
    reason: str | None
    signal: bool | None
    trained_signal: bool | None
    episodes: int
    """Of which a sample takes a gradient, if it is trained."""
    masks: Collection[str]
    """Reason of each sample that takes none."""


Signals = dict[int, dict[str, tuple[bool | None, bool | None]]]


def happened(record: Record, spec: RunSpec, signals: Signals) -> dict[str, Figures]:
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
                _recorded(record, group, policy, signals.get(group.group, {}).get(policy, (None, None)))
                for group in record.groups.values()
            ],
            steps=versions[policy],
            kept=sum(word == "kept" for (_, name), word in verdicts.items() if name == policy),
            ages=record.ages.get(policy, []),
            replayed=replayed[policy],
            never_made=0,
        )
        for policy in spec.trainable
    }


def _recorded(record: Record, group: RecordedGroup, policy: str, signals: tuple[bool | None, bool | None]) -> _Group:
    place = group.places[policy]
    return _Group(
        size=group.size,
        state=place.state,
        reason=place.reason,
        signal=signals[0],
        trained_signal=signals[1],
        episodes=record.trained.get((group.group, policy), 0),
        masks=record.masks.get((group.group, policy), {}).values(),
    )


def signals_of(rerun: Rerun) -> Signals:
    """Recorded group → policy → whether its rewards differ, and those of the samples that are not masked; of the groups
    that were played in the rerun."""
    return {
        slot.content: {policy: (each.signal, each.trained_signal) for policy, each in slot.standings.items()}
        for slot in rerun.slots.values()
        if slot.content is not None
    }


def figures_of(rerun: Rerun) -> dict[str, Figures]:
    return {
        policy: _figures(
            [
                _Group(
                    size=slot.size,
                    state=standing.state,
                    reason=standing.reason,
                    signal=standing.signal,
                    trained_signal=standing.trained_signal,
                    episodes=standing.episodes,
                    masks=standing.masked.values(),
                )
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
    groups: list[_Group],
    *,
    steps: int,
    kept: int,
    ages: list[int],
    replayed: int,
    never_made: int,
) -> Figures:
    judged = [each.signal for each in groups if each.signal is not None]
    trained = [each for each in groups if each.state == "trained"]
    told = [each.trained_signal for each in trained if each.trained_signal is not None]
    return Figures(
        steps=steps,
        kept=kept,
        groups=len(groups),
        episodes=sum(each.size for each in groups),
        episodes_trained=sum(each.episodes for each in trained),
        never_made=never_made,
        with_signal=sum(judged) / len(judged) if judged else None,
        trained_with_signal=sum(told) / len(told) if told else None,
        replayed=replayed,
        stale=sum(each.state == "stale" for each in groups),
        staleness=sum(ages) / len(ages) if ages else None,
        staleness_max=max(ages, default=None),
        dropped=_counted(each.reason or "unknown" for each in groups if each.state == "dropped"),
        masked=_counted(reason for each in trained for reason in each.masks),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Decisions of a rerun beside those of the record."""

    admissions: int
    verdicts: int
    batches: int
    masks: int
    """Samples that were masked when their group was judged."""
    differences: tuple[str, ...]

    @property
    def same(self) -> bool:
        return not self.differences


def compared(rerun: Rerun) -> Comparison:
    """Every task that was chosen, every verdict and mask, the groups of every batch in order, and where all ended."""
    record = rerun.record
    verdicts = recorded_verdicts(record)
    differences = [
        *_of_tasks(rerun),
        *_of_verdicts(rerun, verdicts),
        *_of_masks(rerun, verdicts),
        *_of_batches(rerun),
        *_of_ends(rerun),
    ]
    return Comparison(
        admissions=len(record.groups),
        verdicts=len(verdicts),
        batches=len(rerun.cuts),
        masks=sum(len(_judged(masked)) for masked in record.masks.values()),
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


def _of_masks(rerun: Rerun, recorded: dict[tuple[int, str], str]) -> Iterator[str]:
    """Of the recorded groups that are played at their own moment, whole, with the same verdict."""
    for (group, policy), word in sorted(recorded.items()):
        slot, there = rerun.slots.get(group), rerun.record.groups[group]
        if slot is None or slot.content != group or slot.size != there.size or slot.arrival is None:
            continue
        before = _judged(rerun.record.masks.get((group, policy), {}))
        now = _judged(slot.standings[policy].masked)
        if before != now and rerun.verdicts.get((group, policy)) == word:
            other = "of other samples, " if _reasons(before) == _reasons(now) else ""
            yield f"group {group} for {policy}: masks {_reasons(before)}, now {other}{_reasons(now)}"


def _judged(masked: dict[str, str]) -> dict[str, str]:
    """Without those that only the cut has found too old: that follows from the batch."""
    return {sample_id: reason for sample_id, reason in masked.items() if reason != STALE}


def _reasons(masked: dict[str, str]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in _counted(masked.values()).items()) or "nothing"


def _counted(reasons: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(reasons).items()))


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
