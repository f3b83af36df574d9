"""The changes of one tensor as two streams of integers, and back: positions as gaps, values as differences of bits.

Both go through pcodec (Loncaric, Jeppesen, Zinberg, 2025, arXiv 2502.06112): one set of metadata, then pages that are
decoded one at a time. A gap is the number of unchanged elements before a changed one; a difference wraps around.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, PagingSpec, wrapped

from astraflow.errors import WeightsRefused
from astraflow.types import Array
from astraflow.weights.delta_file import PAGE, WHOLE_PAGE, Delta
from astraflow.weights.tensors import SIZES

BLOCK = 1 << 18
"""Elements compared at once: what fits into a core's cache."""
WHOLE_SHARE = 3
"""A tensor of which more than one in so many elements changed travels whole."""


class Changes(NamedTuple):
    """Where one tensor changed and by how much."""

    gaps: Array
    """uint32, or uint64 for a tensor of 2³² elements or more [changed]"""
    values: Array
    """signed integers as wide as an element [changed]: new bits less old bits, wrapped around"""


def pcodec_header() -> bytes:
    """pcodec's own version mark."""
    header: bytes = wrapped.FileCompressor().write_header()
    return header


def find_changes(base: Array, new: Array) -> Changes | None:
    """Of two flat arrays of bits (unsigned, same length). None: more than a third changed."""
    most = len(base) // WHOLE_SHARE
    found: list[Array] = []
    values: list[Array] = []
    count = 0
    for at in range(0, len(base), BLOCK):
        old, now = base[at : at + BLOCK], new[at : at + BLOCK]
        where = np.flatnonzero(old != now)
        if not len(where):
            continue
        count += len(where)
        if count > most:
            return None
        values.append((now[where] - old[where]).view(_signed(base.itemsize)))
        found.append(where + at)
    if not found:
        return Changes(np.empty(0, _gap_type(len(base))), np.empty(0, _signed(base.itemsize)))
    return Changes(to_gaps(np.concatenate(found), len(base)), np.concatenate(values))


def to_gaps(positions: Array, size: int) -> Array:
    """Strictly increasing positions [k] in a tensor of ``size`` as gaps."""
    gaps = np.empty(len(positions), _gap_type(size))
    if len(positions):
        gaps[0] = positions[0]
        np.subtract(positions[1:] - 1, positions[:-1], out=gaps[1:], casting="unsafe")
    return gaps


def to_positions(gaps: Array) -> Array:
    """int64 [k]"""
    positions = np.cumsum(gaps, dtype=np.int64)
    positions += np.arange(len(gaps))
    return positions


def pack_stream(numbers: Array, *, page: int) -> list[bytes]:
    """pcodec metadata, then pages of ``page`` numbers each; these are plain integers, nothing else is tried."""
    meta, (pages,) = pack_streams([numbers], page=page)
    return [meta, *pages]


def pack_streams(arrays: Sequence[Array], *, page: int) -> tuple[bytes, list[list[bytes]]]:
    """The same of several, one after the other, with the metadata once: it, and the pages of each."""
    counts = [[min(page, len(each) - at) for at in range(0, len(each), page)] for each in arrays]
    config = ChunkConfig(
        mode_spec=ModeSpec.classic(),
        delta_spec=DeltaSpec.no_op(),
        paging_spec=PagingSpec.exact_page_sizes([count for each in counts for count in each]),
        enable_8_bit=True,
    )
    numbers = np.concatenate(arrays) if len(arrays) > 1 else np.ascontiguousarray(arrays[0])
    packed = wrapped.FileCompressor().chunk_compressor(numbers, config)
    number = iter(range(sum(map(len, counts))))
    return packed.write_meta(), [[packed.write_page(next(number)) for _ in each] for each in counts]


class Streams:
    """Reads one entry's streams page by page. Malformed bytes raise WeightsRefused, whatever pcodec makes of them."""

    __slots__ = ("_data", "_pcodec", "_start", "_width", "entry", "scheme")

    def __init__(self, delta: Delta, number: int) -> None:
        """``number``: of the entry."""
        self.entry = delta.entries[number]
        self.scheme = delta.schemes.get(self.entry.dtype)
        self._width = SIZES[self.entry.dtype]
        self._pcodec = delta.pcodec
        self._data = delta.data
        self._start = delta.starts[number]

    def changes(self, *, stop: int | None = None) -> Iterator[tuple[Array, Array]]:
        """(positions int64, differences as unsigned bits) of each page up to page ``stop``; valid until the next."""
        entry = self.entry
        middle = self._start + sum(entry.gaps)
        gaps = self._pages(self._start, entry.gaps, _gap_type(entry.size), stop)
        return self._changes(entry.changed, gaps, self._pages(middle, entry.values, _signed(self._width), stop))

    def part(self, number: int) -> Iterator[tuple[Array, Array]]:
        """The same of one class of an entry that has classes; positions are counted among its members."""
        assert self.scheme is not None, "checked by parse"
        at = self._start + sum(sum(part.gaps) + sum(part.values) for part in self.entry.parts[:number])
        part, scheme = self.entry.parts[number], self.scheme
        if not part.changed:
            return iter(())
        gaps = self._numbers(scheme.gaps[number], at, part.gaps, _gap_type(self.entry.size), PAGE, part.changed)
        at += sum(part.gaps)
        values = self._numbers(scheme.values[number], at, part.values, _signed(self._width), PAGE, part.changed)
        return self._changes(part.changed, gaps, values)

    def bits(self) -> Iterator[Array]:
        """Pages of a tensor that travels whole; valid until the next."""
        return self._pages(self._start, self.entry.values, _unsigned(self._width), None, WHOLE_PAGE)

    def _changes(self, count: int, gaps: Iterator[Array], values: Iterator[Array]) -> Iterator[tuple[Array, Array]]:
        size = self.entry.size
        last = -1
        buffer = np.empty(min(PAGE, count), np.int64)
        for gap, value in zip(gaps, values, strict=True):
            if gap.itemsize == 8 and int(gap.max()) >= size:  # keeps the sum below from wrapping around
                raise WeightsRefused(f"delta: a position of tensor {self.entry.name[:100]} is outside of it")
            positions = np.add(gap, 1, out=buffer[: len(gap)], casting="unsafe")  # unsafe is uint64; checked above
            positions[0] += last
            np.cumsum(positions, out=positions)
            last = int(positions[-1])
            if last >= size:
                raise WeightsRefused(f"delta: a position of tensor {self.entry.name[:100]} is outside of it")
            yield positions, value.view(_unsigned(self._width))

    def _pages(
        self, at: int, sizes: Sequence[int], dtype: np.dtype[Any], stop: int | None, page: int = PAGE
    ) -> Iterator[Array]:
        """``sizes``: bytes of the metadata at ``at``, then of each page."""
        meta, pages = bytes(self._data[at : at + sizes[0]]), sizes[1:] if stop is None else sizes[1 : 1 + stop]
        return self._numbers(meta, at + sizes[0], pages, dtype, page, self.entry.changed)

    def _numbers(
        self, meta: bytes, at: int, sizes: Sequence[int], dtype: np.dtype[Any], page: int, left: int
    ) -> Iterator[Array]:
        """``sizes``: bytes of each page from ``at`` on; ``left``: numbers from there on."""
        buffer = np.empty(min(page, -(-left // 256) * 256), dtype)
        read_into = self._reader(meta, dtype)
        for size in sizes:
            part = bytes(self._data[at : at + size])
            at += size
            count = min(page, left)
            try:
                progress, read = read_into(part, count, buffer)
            except BaseException as error:  # a panic in Rust is no Exception: here it means hostile bytes
                self._refuse(error)
                raise
            if progress.n_processed != count or read != size:
                raise WeightsRefused(f"delta: a page of tensor {self.entry.name[:100]} is not what the index says")
            left -= count
            yield buffer[:count]

    def _reader(self, meta: bytes, dtype: np.dtype[Any]) -> Any:
        try:
            return (
                _decompressor(self._pcodec)
                .chunk_decompressor(meta, f"{dtype.kind}{8 * dtype.itemsize}")[0]
                .read_page_into
            )
        except BaseException as error:  # a panic in Rust is no Exception: here it means hostile bytes
            self._refuse(error)
            raise

    def _refuse(self, error: BaseException) -> None:
        """Raise WeightsRefused for what hostile bytes lead to; a panic in Rust is no Exception and means just that."""
        if isinstance(error, RuntimeError | TypeError | ValueError) or type(error).__name__ == "PanicException":
            raise WeightsRefused(f"delta: a stream of tensor {self.entry.name[:100]} cannot be decoded") from error


@lru_cache(maxsize=2)
def _decompressor(header: bytes) -> Any:
    """For every stream of a delta: to make one takes as long as to decode a page."""
    return wrapped.FileDecompressor.new(header)[0]


def _gap_type(size: int) -> np.dtype[Any]:
    return np.dtype(np.uint32 if size < 1 << 32 else np.uint64)


def _signed(width: int) -> np.dtype[Any]:
    return np.dtype(f"<i{width}")


def _unsigned(width: int) -> np.dtype[Any]:
    return np.dtype(f"<u{width}")
