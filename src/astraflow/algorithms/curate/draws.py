"""One task after another, drawn by weights; those that came last rest while there are others."""

from __future__ import annotations

import numpy as np

from astraflow.algorithms.base import Admission, State
from astraflow.algorithms.checks import check_at_least
from astraflow.algorithms.curate.pool import Pool, draw
from astraflow.types import Array


class Draws:
    """What a Curate is asked by drawing has in common: how many were drawn, and who rests."""

    def __init__(self, who: str, pool: Pool, *, rest: int) -> None:
        """``rest``: groups of others before a task comes again; at most all but one."""
        check_at_least(f"{who}.rest", rest, 0)
        self._pool = pool
        self._resting = Resting(rest)
        self._position = 0

    def next(self, weights: Array) -> Admission:
        """``weights``: float64 [N], the probability of each task but for a factor."""
        place = draw(self._resting.of(weights), self._pool.chance(self._position))
        self._position += 1
        self._resting.add(place, self._pool.size)
        return self._pool.admit(place)

    def state(self, learned: State) -> State:
        """Of the Curate; ``learned``: what of it goes with changed tasks."""
        return self._pool.state(self._position, {**learned, "resting": self._resting.state()})

    def load(self, state: State) -> State | None:
        """What was learned; None: of other tasks."""
        learned = self._pool.learned(state)
        self._position = int(state["position"])
        self._resting.load(learned["resting"] if learned else [])
        return learned


class Resting:
    """The places that came last: they are left out of a draw while there are others."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._places: list[int] = []

    def of(self, weights: Array) -> Array:
        """The weights with those at rest 0; if nothing else has any, every other place alike."""
        if not self._places:
            return weights
        awake = np.ones(len(weights), np.bool_)
        awake[self._places] = False
        left = np.where(awake, weights, 0.0)
        return left if left.any() else awake.astype(np.float64)

    def add(self, place: int, size: int) -> None:
        count = min(self._count, size - 1)
        self._places = [*self._places, place][-count:] if count else []

    def state(self) -> list[int]:
        return list(self._places)

    def load(self, places: list[int]) -> None:
        self._places = [int(place) for place in places]
