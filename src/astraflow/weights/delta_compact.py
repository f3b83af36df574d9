"""A delta whose positions stand alone, rewritten into classes of magnitude where both sides know the base.

sample of the target ─► how many elements, how many changes per exponent ─► the two edges that cost the fewest bits
changes of a tensor  ─► one pass over it: ranks in each class, and positions for the rest
all tensors          ─► one pcodec chunk per class, a page for each tensor
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from astraflow.types import Array
from astraflow.weights.delta_classes import BLOCK, Members
from astraflow.weights.delta_file import FLOATS, PAGE, Delta, Entry, Part, Scheme
from astraflow.weights.delta_streams import Streams, pack_streams, to_gaps
from astraflow.weights.tensors import SIZES, Tensor

Map = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]
Packed = tuple[Entry, Sequence[bytes]]
SAMPLE, EVERY = 2048, 1 << 16
"""So many elements of so many are counted to estimate how many a class has."""
WIDEST = 1 / 8
"""Classes hold at most this share of the elements: their members are listed on both sides."""
WORTH = 0.9
"""Of the bytes that positions and values take now; else nothing is rewritten."""
TRIED = 16
"""Exponents, counted from the largest that may end a class."""


class _Source(NamedTuple):
    streams: Streams
    new: Array
    """Bits of the tensor that the delta leads to [size]"""
    shift: int
    """Bits of the mantissa."""


class _Counts(NamedTuple):
    """Of one tensor."""

    elements: Array
    """By exponent, estimated."""
    moves: Array
    """Kinds of change that occur: exponent before · number of exponents + exponent after."""
    changes: Array
    """How many of each kind."""


def compact(delta: Delta, target: Mapping[str, Tensor], run: Map) -> tuple[list[Packed], tuple[Scheme, ...]] | None:
    """What to build the smaller delta of; None if no dtype is worth it."""
    if delta.schemes:
        return None
    schemes: list[Scheme] = []
    packed: dict[str, Packed] = {}
    for dtype in sorted({entry.dtype for entry in delta.entries} & FLOATS.keys()):
        sources = [
            _source(delta, number, target)
            for number, entry in enumerate(delta.entries)
            if entry.dtype == dtype and not entry.whole and entry.size < 1 << 32
        ]
        edges = _edges(run(_count, sources), sum(source.streams.entry.stream_bytes for source in sources), dtype)
        if edges:
            scheme, entries = _pack(dtype, edges, sources, run)
            schemes.append(scheme)
            packed |= {entry.name: (entry, streams) for entry, streams in entries}
    if not schemes:
        return None
    as_they_are = (
        (entry, [bytes(delta.data[at : at + entry.stream_bytes])])
        for entry, at in zip(delta.entries, delta.starts, strict=True)
    )
    return [packed.get(entry.name, (entry, streams)) for entry, streams in as_they_are], tuple(schemes)


def _source(delta: Delta, number: int, target: Mapping[str, Tensor]) -> _Source:
    entry = delta.entries[number]
    new: Array = target[entry.name].data.view(f"<u{SIZES[entry.dtype]}")
    return _Source(Streams(delta, number), new if new.flags.aligned else new.copy(), FLOATS[entry.dtype])


def _count(source: _Source) -> _Counts:
    """Elements from a sample, changes all."""
    new, shift = source.new, source.shift
    size = 1 << (8 * new.itemsize - 1 - shift)
    mask = new.dtype.type((size << shift) - 1)
    moves = []
    for positions, differences in source.streams.changes():
        after = new[positions]
        before = ((after - differences) & mask) >> shift
        moves.append(before.astype(np.int64) * size + ((after & mask) >> shift))
    sampled = np.concatenate([new[at : at + SAMPLE] for at in range(0, len(new), EVERY)])
    elements = np.bincount((sampled & mask) >> shift, minlength=size) * (len(new) / len(sampled))
    return _Counts(elements, *np.unique(np.concatenate(moves), return_counts=True))


def _edges(counts: Sequence[_Counts], now_bytes: int, dtype: str) -> tuple[int, ...]:
    """Magnitudes at which classes end; empty if classes are not worth it."""
    if not counts:
        return ()
    size = len(counts[0].elements)
    moves = np.zeros((size, size), np.int64)
    for each in counts:
        moves.reshape(-1)[each.moves] += each.changes
    elements = np.maximum(sum(each.elements for each in counts), moves.sum(axis=1))
    below = np.concatenate([[0], np.cumsum(elements)])
    usable = 1 + np.flatnonzero((moves.sum(axis=1)[:-1] > 0) & (below[1:-1] <= WIDEST * below[-1]))

    def bits(*edges: int) -> float:
        """Of positions; what would leave its class is placed among all."""
        classes = list(pairwise((0, *edges)))
        own = np.array([moves[low:high, low:high].sum() for low, high in classes])
        ranked = _entropy(np.array([below[high] - below[low] for low, high in classes]), own).sum()
        return float(ranked + _entropy(below[-1], moves.sum() - own.sum()))

    best = min(combinations(usable[-TRIED:].tolist(), 2), key=lambda edges: bits(*edges), default=())
    if not best or (bits() - bits(*best)) / 8 < (1 - WORTH) * now_bytes:
        return ()
    return tuple(edge << FLOATS[dtype] for edge in best)


def _entropy(elements: Array, changes: Array) -> Array:
    """Bits that tell which of the elements changed."""
    share = np.clip(changes / np.maximum(elements, 1), 1e-12, 1 - 1e-12)
    return -elements * (share * np.log2(share) + (1 - share) * np.log2(1 - share))


def _split(source: _Source, edges: tuple[int, ...]) -> list[tuple[Array, Array]]:
    """(gaps, signed differences) of each class."""
    entry, new = source.streams.entry, source.new
    changes = [(positions.copy(), values.copy()) for positions, values in source.streams.changes()]
    positions, values = (np.concatenate(each) for each in zip(*changes, strict=True))
    members = Members(edges, new.dtype)
    ranks: list[list[Array]] = [[] for _ in range(len(edges) + 1)]
    found: list[list[Array]] = [[] for _ in range(len(edges) + 1)]
    before = np.zeros(len(edges), np.int64)
    first = 0
    for at in range(0, entry.size, BLOCK):
        stop = first + int(np.searchsorted(positions[first:], at + BLOCK))
        places, moves = positions[first:stop] - at, values[first:stop]
        block = new[at : at + BLOCK].copy()
        first = stop
        after = members.class_of(block[places])
        block[places] -= moves
        classes = members.class_of(block[places])
        classes[classes != after] = len(edges)  # it would leave its class
        for number, listed in enumerate(members.of(block)):
            own = classes == number
            ranks[number].append(np.searchsorted(listed, places[own]) + before[number])
            found[number].append(moves[own])
            before[number] += len(listed)
        rest = classes == len(edges)
        ranks[-1].append(places[rest] + at)
        found[-1].append(moves[rest])
    return [
        (to_gaps(np.concatenate(r), entry.size), np.concatenate(v).view(f"<i{new.itemsize}"))
        for r, v in zip(ranks, found, strict=True)
    ]


def _pack(dtype: str, edges: tuple[int, ...], sources: Sequence[_Source], run: Map) -> tuple[Scheme, list[Packed]]:
    splits = run(lambda source: _split(source, edges), sources)
    numbers = range(len(edges) + 1)
    streams = [[split[number][kind] for split in splits] for number in numbers for kind in (0, 1)]
    packed = run(_pack_class, streams)
    metas, pages = [meta for meta, _ in packed], [pages for _, pages in packed]
    scheme = Scheme(dtype, edges, tuple(metas[::2]), tuple(metas[1::2]))
    found: list[Packed] = []
    for index, source in enumerate(sources):
        own = [each[index] for each in pages]
        parts = tuple(
            Part(len(splits[index][number][0]), tuple(map(len, own[2 * number])), tuple(map(len, own[2 * number + 1])))
            for number in numbers
        )
        entry = msgspec.structs.replace(source.streams.entry, gaps=(), values=(), parts=parts)
        found.append((entry, [page for each in own for page in each]))
    return scheme, found


def _pack_class(arrays: list[Array]) -> tuple[bytes, list[list[bytes]]]:
    if not any(map(len, arrays)):
        return b"", [[] for _ in arrays]
    return pack_streams(arrays, page=PAGE)
