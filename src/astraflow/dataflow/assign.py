"""Which worker gets which lease: one pure function.

    pending, oldest first ─► what this worker can finish before it is stale ─► what fewest others can, first

A worker's pace is seconds a sampled token, measured from what it sent. So a slow worker gets what it can finish in
time, and what only fast ones can finish is left to them. It only saves work: what is stale is decided at the cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, inf

from astraflow.dataflow.episodes import Place

ALIKE = 1.25
"""Paces within this factor of the best one are as good: they are measured, and never twice the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One pending training episode."""

    place: Place
    tokens: float = 0.0
    """That it is expected to sample; 0: nobody can be too slow for it."""
    left_s: float = inf
    """From now until what is sampled now is stale."""
    overdue: bool = False
    """It has waited so long that whoever asks next gets it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Paces:
    """Seconds a token of the asking worker, and of every worker that serves, itself included, fastest first."""

    own: float
    all: tuple[float, ...]

    def suits(self, work: Work) -> bool:
        """The asking worker would finish it in time, or is as near to that as anybody."""
        return work.overdue or self.own <= self._slowest(work)

    def able(self, work: Work) -> int:
        """How many workers it suits."""
        return len(self.all) if work.overdue else bisect_right(self.all, self._slowest(work))

    def _slowest(self, work: Work) -> float:
        """The pace that is just fast enough; where nobody's is, that of the fastest."""
        enough = work.left_s / work.tokens if work.tokens else inf
        return enough if enough >= self.all[0] else self.all[0] * ALIKE


def assign(
    train: Sequence[Work],
    evals: Sequence[Place],
    *,
    paces: Paces | None,
    count: int,
    held_train: int,
    held_eval: int,
    eval_share: float,
) -> list[Place]:
    """At most ``count`` of the pending episodes that the worker can play; ``train`` and ``evals`` are oldest first.

    Of training: what is overdue, then what suits fewest workers, the oldest first among equals; nothing that suits only
    faster ones. ``paces=None``: all are equal, so that age alone decides.

    While training episodes wait, evaluation gets at most ``eval_share`` of the worker's leases (one, if that is less
    than one): it finishes soon and delays nothing beyond its share. What training leaves free, evaluation takes.
    """
    wanted = chosen(train, paces)
    slots = held_train + held_eval + count
    share = max(1, floor(slots * eval_share)) if wanted else slots
    lane = list(evals[: max(0, min(count, share - held_eval))])
    work = [each.place for each in wanted[: count - len(lane)]]
    spare = count - len(lane) - len(work)
    return lane + work + list(evals[len(lane) : len(lane) + spare])


def chosen(train: Sequence[Work], paces: Paces | None) -> list[Work]:
    """What suits the worker, in the order in which it should get it."""
    if paces is None:
        return list(train)
    return sorted(filter(paces.suits, train), key=lambda work: (not work.overdue, paces.able(work)))
