"""Which worker gets which lease: one pure function."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

from astraflow.dataflow.episodes import Place


def assign(
    train: Sequence[Place],
    evals: Sequence[Place],
    *,
    count: int,
    held_train: int,
    held_eval: int,
    eval_share: float,
) -> list[Place]:
    """At most ``count`` of the pending episodes that the worker can play, each list oldest first.

    While training episodes wait, evaluation gets at most ``eval_share`` of the worker's leases (one, if that is less
    than one): it finishes soon and delays nothing beyond its share. What training leaves free, evaluation takes.
    """
    slots = held_train + held_eval + count
    share = max(1, floor(slots * eval_share)) if train else slots
    lane = list(evals[: max(0, min(count, share - held_eval))])
    work = list(train[: count - len(lane)])
    spare = count - len(lane) - len(work)
    return lane + work + list(evals[len(lane) : len(lane) + spare])
