"""Several sources as one, in fixed proportions, with random access."""

from __future__ import annotations

from collections.abc import Sequence

from astraflow.errors import ConfigError
from astraflow.tasks.base import TaskSource
from astraflow.tasks.digest import combined
from astraflow.tasks.order import permutation
from astraflow.types import Task


class Mixture:
    """An unbounded source: of every ``sum(weights)`` tasks in a row, ``weights[c]`` come from source c, evenly spread.

    Sized sources come round again, in another order each time. ``Mixture("maths", [(algebra, 3), (sums, 1)])``
    """

    def __init__(self, name: str, parts: Sequence[tuple[TaskSource, int]], *, seed: int = 0) -> None:
        if not parts or any(weight < 1 for _, weight in parts):
            raise ConfigError(
                f"mixture {name!r}: weights must be integers of at least 1, found {[w for _, w in parts]}"
            )
        self._name = name
        self._parts = tuple(parts)
        self._seed = seed
        self._pattern = _interleave([weight for _, weight in parts])
        self._orders: dict[int, tuple[int, list[int]]] = {}

    @property
    def name(self) -> str:
        return self._name

    @property
    def size(self) -> None:
        return None

    def task(self, index: int) -> Task:
        if index < 0:
            raise IndexError(f"task source {self._name!r} has no task {index}")
        cycle, slot = divmod(index, len(self._pattern))
        part, rank = self._pattern[slot]
        source, weight = self._parts[part]
        at = cycle * weight + rank
        if source.size is None:
            return source.task(at)
        epoch, place = divmod(at, source.size)
        return source.task(self._order(part, epoch, source.size)[place])

    def digest(self) -> str:
        return combined("mixture", self._name, self._seed, [(source.digest(), w) for source, w in self._parts])

    def _order(self, part: int, epoch: int, size: int) -> list[int]:
        held = self._orders.get(part)
        if held is None or held[0] != epoch:
            held = (epoch, permutation(size, seed=(self._seed, part, epoch)).tolist())
            self._orders[part] = held
        return held[1]


def _interleave(weights: Sequence[int]) -> list[tuple[int, int]]:
    """(part, rank within part) for every slot of a cycle: each slot goes to the part that is furthest behind."""
    total = sum(weights)
    taken = [0] * len(weights)
    pattern: list[tuple[int, int]] = []
    for slot in range(1, total + 1):
        behind = [weight * slot - total * count for weight, count in zip(weights, taken, strict=True)]
        part = behind.index(max(behind))
        pattern.append((part, taken[part]))
        taken[part] += 1
    return pattern
