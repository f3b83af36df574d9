"""Which rows of a batch are a pair: what preference losses compare. Numpy only, pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from astraflow.errors import InvalidRecord
from astraflow.trainer.packing import advantages_of
from astraflow.types import Array, Row, SampleKind

NONE = -1


def pair_numbers(rows: Sequence[Row]) -> Array:
    """int64 [rows]: rows with the same number are a pair, ``NONE`` is in none; only trained ``rl`` rows are.

    Rows that name their pair (``Row.pair``) are left as they are named. Where no row of the batch does, each group's
    rows of the same agent and place are paired by mean advantage: the best with the worst, the second with the last
    but one, while the better is strictly better; a middle one is left over. Ties are in the order of the rows.
    """
    eligible = [n for n, row in enumerate(rows) if row.kind is SampleKind.RL and row.mask.any()]
    found = np.full(len(rows), NONE, np.int64)
    pairs = _named(rows, eligible) if any(row.pair is not None for row in rows) else _ranked(rows, eligible)
    for number, pair in enumerate(pairs):
        found[list(pair)] = number
    return found


def _named(rows: Sequence[Row], eligible: Sequence[int]) -> list[tuple[int, int]]:
    members: dict[str, list[int]] = {}
    for n in eligible:
        name = rows[n].pair
        if name is not None:
            members.setdefault(name, []).append(n)
    for name, found in members.items():
        if len(found) > 2:
            raise InvalidRecord(f"pair {name!r} has {len(found)} rows, a pair has two: {rows[found[2]].sample_id}")
    return [(found[0], found[1]) for found in members.values() if len(found) == 2]


def _ranked(rows: Sequence[Row], eligible: Sequence[int]) -> list[tuple[int, int]]:
    """A row's id is ``group/index/agent/n``."""
    alike: dict[tuple[str, str, int], list[int]] = {}
    for n in eligible:
        group, _, rest = rows[n].sample_id.partition("/")
        place = rest.partition("/")[2]
        alike.setdefault((group, place, rows[n].use), []).append(n)
    worth = {n: float(advantages_of(rows[n])[rows[n].mask].astype(np.float64).mean()) for n in eligible}
    pairs = []
    for found in alike.values():
        ranked = sorted(found, key=lambda n: -worth[n])
        half = len(ranked) // 2
        pairs += [(a, b) for a, b in zip(ranked[:half], reversed(ranked), strict=False) if worth[a] > worth[b]]
    return pairs
