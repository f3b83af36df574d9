"""Two sources from one: tasks to train on and tasks that are only ever evaluated, told apart by the hash of their key.

The side is a property of the key, not of a position or of a random state: no restart, reordering, growth of an
unbounded supply or second process can move a held-out task into training.
"""

from __future__ import annotations

from typing import NamedTuple

from astraflow.errors import ConfigError
from astraflow.tasks.base import TaskSource
from astraflow.tasks.digest import combined, key_fraction
from astraflow.tasks.lists import in_range
from astraflow.types import Task

STRIDE = 1 << 40
"""Distance of the substitutes that an unbounded source is asked for where a task turns out to be held out."""
ATTEMPTS = 64


class Split(NamedTuple):
    train: TaskSource
    held_out: TaskSource


def held_out(source: TaskSource, *, count: int, fraction: float = 0.05, salt: str = "") -> Split:
    """``count`` tasks are held out. Of a sized source: those with the smallest key hashes, the rest is trained on.

    Of an unbounded one: every key whose hash is below ``fraction`` is kept out of training, and the first ``count``
    different ones of them are evaluated. Raises ConfigError when there are not that many.
    """
    if count < 1:
        raise ConfigError(f"held_out: count must be at least 1, found {count}")
    if source.size is not None:
        return _split_sized(source, source.size, count, salt)
    if not 0 < fraction < 1:
        raise ConfigError(f"held_out: fraction must be in (0, 1), found {fraction}")
    return _split_unbounded(source, count, fraction, salt)


def _split_sized(source: TaskSource, size: int, count: int, salt: str) -> Split:
    keys = [source.task(index).key for index in range(size)]
    ranked = sorted({(key_fraction(key, salt=salt), key) for key in keys})
    if count >= len(ranked):
        raise ConfigError(f"held_out: {count} of {len(ranked)} tasks of {source.name!r} leave none to train on")
    chosen = {key for _, key in ranked[:count]}
    digest = combined("held_out", source.digest(), count, salt)
    return Split(
        train=_Picked(source, [i for i, key in enumerate(keys) if key not in chosen], "train", digest),
        held_out=_Picked(source, [i for i, key in enumerate(keys) if key in chosen], "held_out", digest),
    )


def _split_unbounded(source: TaskSource, count: int, fraction: float, salt: str) -> Split:
    found: dict[str, int] = {}
    limit = int(count / fraction * 5) + 1000
    for index in range(limit):
        key = source.task(index).key
        if key_fraction(key, salt=salt) < fraction:
            found.setdefault(key, index)
            if len(found) == count:
                break
    else:
        raise ConfigError(
            f"held_out: only {len(found)} different keys of the first {limit} tasks of {source.name!r} are below "
            f"fraction {fraction}, {count} are wanted; raise fraction or lower count"
        )
    digest = combined("held_out", source.digest(), count, fraction, salt)
    return Split(
        train=_Unheld(source, fraction, salt, digest),
        held_out=_Picked(source, list(found.values()), "held_out", digest),
    )


class _Picked:
    """Some tasks of a source, by index."""

    def __init__(self, source: TaskSource, indices: list[int], side: str, digest: str) -> None:
        self._source = source
        self._indices = indices
        self._side = side
        self._digest = combined(side, digest)

    @property
    def name(self) -> str:
        return self._source.name if self._side == "train" else f"{self._source.name}/{self._side}"

    @property
    def size(self) -> int:
        return len(self._indices)

    def task(self, index: int) -> Task:
        return self._source.task(self._indices[in_range(index, self.size, self.name)])

    def digest(self) -> str:
        return self._digest


class _Unheld:
    """The training side of an unbounded source: a task that is held out is replaced by the one a stride further."""

    def __init__(self, source: TaskSource, fraction: float, salt: str, digest: str) -> None:
        self._source = source
        self._fraction = fraction
        self._salt = salt
        self._digest = combined("train", digest)

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def size(self) -> None:
        return None

    def task(self, index: int) -> Task:
        for attempt in range(ATTEMPTS):
            task = self._source.task(index + attempt * STRIDE)
            if key_fraction(task.key, salt=self._salt) >= self._fraction:
                return task
        raise ConfigError(
            f"task source {self.name!r}: {ATTEMPTS} tasks in a row from index {index} are held out; "
            f"its keys must differ, or lower fraction {self._fraction}"
        )

    def digest(self) -> str:
        return self._digest
