"""The parts of a rerun: a moment at which a group was opened, what is put there, and the batches that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from astraflow.algorithms.base import UnitTable
from astraflow.dataflow.cut import STALE
from astraflow.dataflow.groups import place_of
from astraflow.run.replay.record import RecordedGroup
from astraflow.types import Array, Episode, Span, Task, Trajectory


@dataclass(kw_only=True, slots=True)
class Standing:
    """What a slot is for one policy; states as in the ledger."""

    state: str = "open"
    reason: str | None = None
    min_version: int | None = None
    fresh_version: int | None = None
    version: int | None = None
    uses: int = 1
    signal: bool | None = None
    """Whether rewards that are compared differ; None: nothing was judged."""
    trained_signal: bool | None = None
    """The same of the samples that are not masked."""
    units: UnitTable | None = None
    advantages: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    trainable: dict[str, int | None] = field(default_factory=dict)
    """sample_id → its oldest version, None of a supervised one; of the samples that may be trained."""
    masked: dict[str, str] = field(default_factory=dict)
    """sample_id → why it may not: as judged, and from the cut on those that were stale there."""
    trains: bool = False
    """A step with it alone would have a gradient."""

    @property
    def episodes(self) -> int:
        """Those of which a sample may be trained."""
        return len({place_of(sample_id)[0] for sample_id in self.trainable})

    def mask_stale(self, oldest: int) -> None:
        """At the cut: samples of a version before ``oldest`` take no gradient."""
        for sample_id, version in list(self.trainable.items()):
            if version is not None and version < oldest:
                del self.trainable[sample_id]
                self.masked[sample_id] = STALE


@dataclass(kw_only=True, slots=True)
class Slot:
    """A moment of the record at which a group was opened, and what the algorithms put there."""

    group: int
    task: Task
    size: int
    content: int | None
    """The recorded group that is played here; None: such a group was never made."""
    ahead: dict[str, int]
    """Policy → versions by which the rerun was ahead of the record when the slot was opened."""
    arrival: int | None = None
    settled: bool = False
    standings: dict[str, Standing] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Cut:
    """A batch that a trainer asked for. ``groups`` empty: it still waits."""

    batch: int
    policy: str
    need: int
    recorded: tuple[int, ...]
    windowed: bool
    """False: of a starved policy, an open group did not hold it back."""
    groups: tuple[tuple[int, int], ...] = ()
    """(group, use)"""
    state: str = "waiting"
    """waiting, cut, committed or dropped"""
    reason: str | None = None
    due: str | None = None
    """What the record did with it while it waited: ``committed`` or the reason of its drop."""

    @property
    def same(self) -> bool:
        return tuple(group for group, _ in self.groups) == self.recorded


class Stock:
    """Recorded groups by task, each to be used once."""

    def __init__(self, groups: Mapping[int, RecordedGroup]) -> None:
        self._groups = groups
        self._by_task: dict[tuple[str, str, str], list[int]] = {}
        for group in groups.values():
            self._by_task.setdefault(_identity(group.task), []).append(group.group)

    def take(self, task: Task, size: int, *, near: int) -> int | None:
        """The group of this task that was made nearest in time, with enough episodes; None: there is none left."""
        there = self._by_task.get(_identity(task), [])
        fitting = [each for each in there if self._groups[each].size >= size and self._is_made(each, near)]
        if not fitting:
            return None
        best = min(fitting, key=lambda each: (abs(each - near), each))
        there.remove(best)
        return best

    def _is_made(self, group: int, near: int) -> bool:
        """One that never ended can only stand where it stood: there it does not end either."""
        return group == near or self._groups[group].arrival is not None


def _identity(task: Task) -> tuple[str, str, str]:
    return task.dataset, task.key, task.workflow


def shifted(episodes: Sequence[Episode | None], by: Mapping[str, int]) -> list[Episode | None]:
    """As if they had been sampled so many versions later, by policy; no version is below 0."""
    if not any(by.values()):
        return list(episodes)
    return [None if each is None else _episode(each, by) for each in episodes]


def _episode(episode: Episode, by: Mapping[str, int]) -> Episode:
    moved = tuple(_trajectory(each, by.get(each.policy, 0)) for each in episode.trajectories)
    return msgspec.structs.replace(episode, trajectories=moved)


def _trajectory(trajectory: Trajectory, by: int) -> Trajectory:
    samples = tuple(
        msgspec.structs.replace(sample, spans=tuple(_span(span, by) for span in sample.spans))
        for sample in trajectory.samples
    )
    return msgspec.structs.replace(trajectory, samples=samples)


def _span(span: Span, by: int) -> Span:
    return msgspec.structs.replace(span, version=max(0, span.version + by))
