"""The bytes of a delta: a safetensors file, so that every tool can look at it, with everything counted and checked.

    __metadata__   format, lineage (digests before and after), counts
    index  U8      zlib of msgpack: one ``Entry`` per tensor that changed, one ``Scheme`` per dtype that has classes
    data   U8      their pcodec streams, end to end, in the order of the index
    check  U8[16]  xxh3-128 of all that comes before it

Bounds on what a hostile file makes us allocate: an index of ``MAX_INDEX_BYTES`` unpacked, under 512 MiB as objects.
Tensor data is then decoded page by page.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import xxhash

from astraflow.errors import DigestMismatch, FullTransferNeeded, WeightsRefused
from astraflow.types import Array
from astraflow.weights.tensors import SIZES, parse_tensors, read_metadata

FORMAT = "astraflow delta 2"
PAGE = 4096
"""Changes of one page of a stream: what is decoded at once."""
WHOLE_PAGE = 1 << 16
"""Elements of one page of a tensor that travels whole."""
MAX_INDEX_BYTES = 8 << 20
MAX_EDGES = 7
FLOATS = {"BF16": 7, "F16": 10, "F32": 23}
"""Bits of the mantissa by dtype: those whose elements have classes of magnitude."""
MAX_HEADER_BYTES = 4096
CHECK_BYTES = 16
_DIGEST = re.compile(r"([0-9a-f]{64})?", re.ASCII)
_PARTS = ("index", "data", "check")

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class DeltaHeader(NamedTuple):
    """What a delta says of itself."""

    base: str
    """Digest (``weights.digest``) of the weights that it starts from, as manifests name them; may be empty."""
    target: str
    """Of those that it leads to; may be empty."""
    base_xxh3: str
    """``quick_digest`` of both, which the receiver checks in memory."""
    target_xxh3: str
    tensors: int
    """How many changed; tied ones once."""
    changed: int
    """Elements that changed, of tensors that travel as changes."""
    whole: int
    """Elements of tensors that travel whole."""


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The changes of one class of a tensor's elements."""

    changed: Count
    gaps: tuple[Count, ...] = ()
    """Bytes of each page; the pcodec metadata is in the ``Scheme``."""
    values: tuple[Count, ...] = ()


class Scheme(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Classes of a dtype's elements by their magnitude before the change (their bits without the sign)."""

    dtype: str
    edges: tuple[Count, ...]
    """Class c is what lies below edge c and in no class before; one class more is of changes to any element."""
    gaps: tuple[bytes, ...]
    """pcodec metadata of each class, for all tensors of the dtype; empty if nothing changed in it."""
    values: tuple[bytes, ...]


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor that changed."""

    name: str
    dtype: str
    shape: tuple[Count, ...]
    changed: Count
    """Elements in the stream; of a tensor that travels whole, all of them."""
    values: tuple[Count, ...]
    """Bytes of the pcodec metadata, then of each page; empty with ``parts``."""
    gaps: tuple[Count, ...] = ()
    """The same of the positions; empty without ``parts``: the tensor travels whole."""
    check: bytes = b""
    """xxh3-128 of the bits of a tensor that travels whole."""
    aliases: tuple[str, ...] = ()
    """Other names with the same bits before and after: tied tensors travel once."""
    parts: tuple[Part, ...] = ()
    """By class of the dtype's ``Scheme``, the last of any element."""

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def whole(self) -> bool:
        return not self.gaps and not self.parts

    @property
    def stream_bytes(self) -> int:
        return sum(self.gaps) + sum(self.values) + sum(sum(p.gaps) + sum(p.values) for p in self.parts)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


class Entries:
    """Entries as bytes, decoded when they are asked for: of many tensors the index would take more memory, as objects,
    than everything else that applying a delta holds."""

    __slots__ = ("_ends", "_packed")

    def __init__(self, entries: Iterable[Entry]) -> None:
        packed = [msgspec.msgpack.encode(entry) for entry in entries]
        self._packed = memoryview(b"".join(packed))
        self._ends = array("Q", accumulate(map(len, packed), initial=0))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> Entry:
        return _ENTRY.decode(self._packed[self._ends[number] : self._ends[number + 1]])

    def __iter__(self) -> Iterator[Entry]:
        return (self[number] for number in range(len(self)))


_ENTRY = msgspec.msgpack.Decoder(Entry)


class _Index(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pcodec: bytes
    """Its format header, the same for every stream."""
    entries: tuple[Entry, ...]
    schemes: tuple[Scheme, ...] = ()


class Delta(NamedTuple):
    """A parsed delta; ``data`` is a view of its bytes."""

    header: DeltaHeader
    pcodec: bytes
    entries: Entries
    starts: array[int]
    """Where each entry's streams begin in ``data``."""
    data: memoryview
    schemes: dict[str, Scheme]
    """By dtype."""


def build(
    lineage: tuple[str, str, str, str],
    pcodec: bytes,
    streams: Sequence[tuple[Entry, Sequence[bytes]]],
    schemes: tuple[Scheme, ...] = (),
) -> bytes:
    """A delta's bytes. ``lineage``: the first four fields of its header; each entry comes with its streams in order.

    Raises FullTransferNeeded where the index would be larger than ``parse`` takes."""
    entries = tuple(entry for entry, _ in streams)
    data = b"".join(part for _, parts in streams for part in parts)
    raw = msgspec.msgpack.encode(_Index(pcodec, entries, schemes))
    if len(raw) > MAX_INDEX_BYTES:  # no receiver would unpack it
        raise FullTransferNeeded(
            f"delta: {len(entries)} tensors changed in so many pages that its index takes {len(raw)} bytes; at most "
            f"{MAX_INDEX_BYTES} may: full transfer needed"
        )
    index = zlib.compress(raw, 9)
    metadata = {
        "format": FORMAT,
        **dict(zip(DeltaHeader._fields, lineage, strict=False)),
        "tensors": str(len(entries)),
        "changed": str(sum(entry.changed for entry in entries if not entry.whole)),
        "whole": str(sum(entry.changed for entry in entries if entry.whole)),
    }
    header: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for name, size in zip(_PARTS, (len(index), len(data), CHECK_BYTES), strict=True):
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join((struct.pack("<Q", len(text)), text, index, data))
    return body + xxhash.xxh3_128_digest(body)


def parse(delta: bytes | memoryview) -> Delta:
    """Everything but the streams, checked. Raises WeightsRefused (malformed), DigestMismatch (damaged)."""
    raw = np.frombuffer(delta, np.uint8)
    if len(raw) < 8 or struct.unpack("<Q", raw[:8].tobytes())[0] > MAX_HEADER_BYTES:
        raise WeightsRefused(f"delta: {len(raw)} bytes that do not begin with the header of a delta")
    if xxhash.xxh3_128_digest(raw[:-CHECK_BYTES].data) != raw[-CHECK_BYTES:].tobytes():
        raise DigestMismatch("delta: it is damaged or cut off (its checksum is wrong)")
    parts = {tensor.name: tensor for tensor in parse_tensors(raw, "delta")}
    if set(parts) != set(_PARTS) or len(parts["check"].data) != CHECK_BYTES:
        raise WeightsRefused(f"delta: it must consist of {', '.join(_PARTS)}")
    header = _header(read_metadata(raw, "delta"))
    index = _index(parts["index"].data)
    schemes = _schemes(index)
    starts, at = array("Q"), 0
    for entry in index.entries:
        _require_sound(entry, schemes)
        starts.append(at)
        at += entry.stream_bytes
    data = parts["data"].data
    if at != len(data):
        raise WeightsRefused(f"delta: its streams have {len(data)} bytes, the index says {at}")
    _require_counts(header, index.entries)
    return Delta(header, index.pcodec, Entries(index.entries), starts, data.data, schemes)


def _header(metadata: dict[str, str]) -> DeltaHeader:
    if metadata.get("format") != FORMAT:
        raise WeightsRefused(f"delta: its format is {metadata.get('format', 'none')[:40]!r}, this is {FORMAT!r}")
    values = [metadata.get(name, "") for name in DeltaHeader._fields]
    digests, counts = values[:4], values[4:]
    if not all(_DIGEST.fullmatch(d) for d in digests) or not all(digests[2:]):
        raise WeightsRefused("delta: a digest in its header is not one")
    if not all(c.isascii() and c.isdigit() and len(c) <= 15 for c in counts):
        raise WeightsRefused("delta: a count in its header is not one")
    base, target, base_xxh3, target_xxh3 = digests
    tensors, changed, whole = map(int, counts)
    return DeltaHeader(base, target, base_xxh3, target_xxh3, tensors, changed, whole)


def _index(packed: Array) -> _Index:
    unpack = zlib.decompressobj()
    try:
        raw = unpack.decompress(packed.tobytes(), MAX_INDEX_BYTES)
        if not unpack.eof or unpack.unused_data:
            raise WeightsRefused(f"delta: its index is cut off or takes more than {MAX_INDEX_BYTES} bytes")
        return msgspec.msgpack.decode(raw, type=_Index)
    except (zlib.error, msgspec.DecodeError, RecursionError) as error:
        raise WeightsRefused(f"delta: its index cannot be read: {str(error)[:100]}") from error


def _schemes(index: _Index) -> dict[str, Scheme]:
    found = {scheme.dtype: scheme for scheme in index.schemes}
    for scheme in index.schemes:
        edges = scheme.edges
        sound = (
            scheme.dtype in FLOATS
            and 0 < len(edges) <= MAX_EDGES
            and all(low < high for low, high in pairwise((0, *edges)))
            and edges[-1] < 1 << (8 * SIZES[scheme.dtype] - 1)
            and len(scheme.gaps) == len(scheme.values) == len(edges) + 1
        )
        if not sound or len(found) < len(index.schemes):
            raise WeightsRefused(f"delta: the index's classes of dtype {scheme.dtype[:100]!r} are malformed")
    return found


def _require_sound(entry: Entry, schemes: dict[str, Scheme]) -> None:
    """One entry agrees with itself."""
    size = entry.size
    sound = (
        entry.dtype in SIZES
        and len(entry.shape) <= 16
        and size < 1 << 48
        and 0 < entry.changed <= size
        and (_are_parts_sound(entry, schemes) if entry.parts else _are_pages_sound(entry))
        and len(entry.check) == (CHECK_BYTES if entry.whole else 0)
    )
    if not sound:
        raise WeightsRefused(f"delta: the index's entry of tensor {entry.name[:100]!r} is malformed")


def _are_pages_sound(entry: Entry) -> bool:
    page = WHOLE_PAGE if entry.whole else PAGE
    return (
        len(entry.values) == 1 + -(-entry.changed // page)
        and (entry.whole or len(entry.gaps) == len(entry.values))
        and (not entry.whole or entry.changed == entry.size)
    )


def _are_parts_sound(entry: Entry, schemes: dict[str, Scheme]) -> bool:
    scheme = schemes.get(entry.dtype)
    return (
        scheme is not None
        and not entry.gaps
        and not entry.values
        and len(entry.parts) == len(scheme.edges) + 1
        and all(len(p.gaps) == len(p.values) == -(-p.changed // PAGE) for p in entry.parts)
        and sum(p.changed for p in entry.parts) == entry.changed
        and entry.size < 1 << 32
    )


def _require_counts(header: DeltaHeader, entries: tuple[Entry, ...]) -> None:
    names = [name for entry in entries for name in entry.names]
    changed = sum(entry.changed for entry in entries if not entry.whole)
    whole = sum(entry.changed for entry in entries if entry.whole)
    if len(set(names)) < len(names):
        raise WeightsRefused("delta: a tensor occurs twice")
    if (header.tensors, header.changed, header.whole) != (len(entries), changed, whole):
        raise WeightsRefused("delta: its header counts other tensors or elements than its index")
