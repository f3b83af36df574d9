"""Which queries of a packed row meet which keys: the tree's mask as a few dense blocks. Pure, numpy.

A mask of a whole packed row is nearly empty: an answer sees its prompt and itself, not the other answers. Consecutive
tokens ``[start, stop)`` see nothing but themselves and the ancestors of ``start`` (an ancestor of a later token that
lies before ``start`` has ``start`` in its subtree too), so such a block is a small dense attention of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from astraflow.trainer.packing import PackedRow
from astraflow.types import Array

BLOCK_COST = 7000
"""What a block costs beside its size, in query-key pairs: 0.5 ms at 0.07 µs a pair on one Zen 4 core."""
LONGEST_PIECE = 128
"""A chain without a branch may be cut after so many tokens: half of a causal square is empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Queries ``start .. stop - 1``; keys are ``past``, then the queries' own tokens."""

    start: int
    stop: int
    past: Array
    """int64 [P]: ancestors of ``start``."""
    seen: Array
    """bool [stop - start, P + stop - start]"""


def plan_blocks(packed: PackedRow) -> list[Block]:
    """Blocks that cover the packed row, at about the least cost over all cuts at branches."""
    cuts = _candidates(packed)
    bounds = _cheapest(cuts, packed.positions)
    return [_block(packed.end, start, stop) for start, stop in pairwise(bounds)]


def _candidates(packed: PackedRow) -> Array:
    """Where a block may begin, and the end: at every first token of a branch, and every so often in a long chain."""
    length = len(packed.tokens)
    index = np.arange(1, length)
    follows = packed.positions[1:] == packed.positions[:-1] + 1
    only_child = follows & (packed.end[1:] == packed.end[:-1])
    return np.unique(np.concatenate([[0], index[~only_child], np.arange(0, length, LONGEST_PIECE), [length]]))


def _cheapest(cuts: Array, depth: Array) -> list[int]:
    """The cuts to make: least sum of ``BLOCK_COST + queries * keys``, by dynamic programming."""
    last = len(cuts) - 1
    best = np.zeros(last + 1)
    back = np.zeros(last + 1, np.int64)
    past = depth[cuts[:-1]]
    for j in range(1, last + 1):
        size = cuts[j] - cuts[:j]
        cost = best[:j] + BLOCK_COST + size * (past[:j] + size)
        back[j] = int(cost.argmin())
        best[j] = cost[back[j]]
    bounds = [last]
    while bounds[-1]:
        bounds.append(int(back[bounds[-1]]))
    return [int(cuts[i]) for i in reversed(bounds)]


def _block(end: Array, start: int, stop: int) -> Block:
    past = np.flatnonzero(end[:start] > start)
    keys = np.concatenate([past, np.arange(start, stop)])
    queries = np.arange(start, stop)[:, None]
    return Block(start=start, stop=stop, past=past, seen=(keys <= queries) & (queries < end[keys]))
