"""Two deltas in a row as one: differences at the same place add up, and what cancels out is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from astraflow.errors import WeightsRefused
from astraflow.types import Array
from astraflow.weights.delta_file import PAGE, WHOLE_PAGE, Delta, Entry
from astraflow.weights.delta_streams import Streams, pack_stream, to_gaps
from astraflow.weights.tensors import SIZES

Packed = tuple[Entry, list[bytes]]
Map = Callable[[Callable[["_Pair"], Packed | None], Sequence["_Pair"]], list[Packed | None]]


class _Source(NamedTuple):
    delta: Delta
    at: int

    @property
    def entry(self) -> Entry:
        return self.delta.entries[self.at]

    @property
    def streams(self) -> Streams:
        return Streams(self.delta, self.at)


class _Pair(NamedTuple):
    """What the two deltas say of some names, all of which they treat alike."""

    names: tuple[str, ...]
    first: _Source | None
    second: _Source | None


def merge_entries(first: Delta, second: Delta, limit_bytes: int, run: Map) -> list[Packed]:
    """Entries with their streams, by name. Raises WeightsRefused."""
    if first.pcodec != second.pcodec:
        raise WeightsRefused("delta: the two were written by different versions of pcodec and cannot be merged")
    if first.schemes or second.schemes:
        raise WeightsRefused("delta: what compact_delta made cannot be merged; merge what it was made of")
    pairs = _pairs(first, second)
    needs = sum(_needs(pair) for pair in pairs)
    if needs > limit_bytes:
        raise WeightsRefused(f"delta: merging would take {needs} bytes of memory, the limit is {limit_bytes}")
    merged = [each for each in run(_merge, pairs) if each is not None]
    return sorted(merged, key=lambda each: each[0].name)


def _pairs(first: Delta, second: Delta) -> list[_Pair]:
    ones, twos = _by_name(first), _by_name(second)
    groups: dict[tuple[int, int], list[str]] = {}
    for name in sorted(ones.keys() | twos.keys()):
        groups.setdefault((ones.get(name, -1), twos.get(name, -1)), []).append(name)
    return [
        _Pair(tuple(names), _Source(first, a) if a >= 0 else None, _Source(second, b) if b >= 0 else None)
        for (a, b), names in groups.items()
    ]


def _by_name(delta: Delta) -> dict[str, int]:
    return {name: index for index, entry in enumerate(delta.entries) for name in entry.names}


def _needs(pair: _Pair) -> int:
    """Bytes that merging takes at most: both unpacked, joined and sorted."""
    if pair.first is None or pair.second is None or pair.second.entry.whole:
        return 0
    both = (pair.first.entry, pair.second.entry)
    return sum(e.changed * SIZES[e.dtype] * 2 if e.whole else e.changed * (32 + 4 * SIZES[e.dtype]) for e in both)


def _merge(pair: _Pair) -> Packed | None:
    one, two = pair.first, pair.second
    if one is None or two is None:
        only = one or two
        assert only is not None, "a pair has a source"
        return _copy(pair.names, only)
    if (one.entry.dtype, one.entry.shape) != (two.entry.dtype, two.entry.shape):
        raise WeightsRefused(f"delta: the two give tensor {pair.names[0][:100]} different forms")
    if two.entry.whole:
        return _copy(pair.names, two)
    return _rewrite(pair.names, one, two) if one.entry.whole else _add(pair.names, one, two)


def _copy(names: tuple[str, ...], source: _Source) -> Packed:
    """The streams as they are."""
    delta, entry, at = source.delta, source.entry, source.delta.starts[source.at]
    return _named(entry, names), [bytes(delta.data[at : at + entry.stream_bytes])]


def _rewrite(names: tuple[str, ...], one: _Source, two: _Source) -> Packed:
    """A tensor that came whole, then changed."""
    bits: Array = np.concatenate([page.copy() for page in one.streams.bits()])
    for positions, differences in two.streams.changes():
        bits[positions] += differences
    values = pack_stream(bits, page=WHOLE_PAGE)
    check = xxhash.xxh3_128_digest(bits.data)
    entry = _named(one.entry, names)
    return _with(entry, changed=len(bits), values=values, gaps=[], check=check), values


def _add(names: tuple[str, ...], one: _Source, two: _Source) -> Packed | None:
    size = one.entry.size
    parts = [(p.copy(), d.copy()) for source in (one, two) for p, d in source.streams.changes()]
    positions = np.concatenate([p for p, _ in parts])
    differences = np.concatenate([d for _, d in parts])
    order = np.argsort(positions, kind="stable")
    positions, differences = positions[order], differences[order]
    again = np.flatnonzero(positions[1:] == positions[:-1])  # each comes at most twice: once from either
    differences[again] += differences[again + 1]
    differences[again + 1] = 0
    kept = np.flatnonzero(differences)
    if not len(kept):
        return None
    signed = differences[kept].view(f"<i{differences.itemsize}")
    gaps = pack_stream(to_gaps(positions[kept], size), page=PAGE)
    values = pack_stream(signed, page=PAGE)
    entry = _with(_named(one.entry, names), changed=len(kept), values=values, gaps=gaps, check=b"")
    return entry, [*gaps, *values]


def _named(entry: Entry, names: tuple[str, ...]) -> Entry:
    return msgspec.structs.replace(entry, name=names[0], aliases=names[1:])


def _with(entry: Entry, *, changed: int, values: list[bytes], gaps: list[bytes], check: bytes) -> Entry:
    return msgspec.structs.replace(
        entry, changed=changed, values=tuple(map(len, values)), gaps=tuple(map(len, gaps)), check=check
    )
