"""A delta that was cut, damaged or made to harm: an error of ours, and not a bit of the base is changed."""

from __future__ import annotations

import json
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.errors import AstraFlowError, DigestMismatch, WeightsRefused
from astraflow.weights.delta import apply_delta, encode_delta, merge_deltas, read_header
from astraflow.weights.delta_file import CHECK_BYTES, MAX_INDEX_BYTES, PAGE, Delta, Entry, build, parse
from astraflow.weights.delta_streams import pcodec_header
from tests.unit.weights.arrays import Weights, copy, same


def small() -> tuple[Weights, Weights, bytes]:
    base = {"a": np.arange(60, dtype=np.uint16), "w": np.zeros(9, np.float32)}
    new = copy(base)
    new["a"][[3, 4, 40]] += 1
    new["w"][:] = 1.5
    return base, new, encode_delta(base, new)


BASE, NEW, DELTA = small()


def refused(
    delta: bytes, *, base: Weights = BASE, error: type[Exception] = AstraFlowError, words: str = "delta"
) -> None:
    held = copy(base)
    with pytest.raises(error, match=words):
        apply_delta(held, delta, threads=1)
    assert same(held, base)


def sealed(body: bytes) -> bytes:
    """With the right checksum: only what is said may give it away."""
    return body + xxhash.xxh3_128_digest(body)


def parts_of(delta: bytes) -> tuple[dict[str, Any], Any, bytes]:
    """Header, index and data."""
    size = struct.unpack("<Q", delta[:8])[0]
    header = json.loads(delta[8 : 8 + size])
    begin, end = header["index"]["data_offsets"]
    index = msgspec.msgpack.decode(zlib.decompress(delta[8 + size + begin : 8 + size + end]))
    begin, end = header["data"]["data_offsets"]
    return header, index, delta[8 + size + begin : 8 + size + end]


def remade(change: Callable[[dict[str, Any], Any], None]) -> bytes:
    """The small delta with something else in its metadata or index, everything around it consistent."""
    header, index, data = parts_of(DELTA)
    change(header["__metadata__"], index)
    return assembled(header["__metadata__"], zlib.compress(msgspec.msgpack.encode(index)), data)


def assembled(metadata: Any, index: bytes, data: bytes, *, check: int = CHECK_BYTES) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, size in (("index", len(index)), ("data", len(data)), ("check", check)):
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return sealed(struct.pack("<Q", len(text)) + text + index + data)


def test_the_small_delta_is_good_as_it_is() -> None:
    held = copy(BASE)
    apply_delta(held, DELTA)
    assert same(held, NEW)
    apply_delta(held := copy(BASE), remade(lambda metadata, index: None))
    assert same(held, NEW)


def test_cut_off_at_every_byte() -> None:
    for end in range(len(DELTA)):
        refused(DELTA[:end])


def test_every_bit_flipped() -> None:
    for at in range(len(DELTA)):
        for bit in (0, 3, 7):
            damaged = bytearray(DELTA)
            damaged[at] ^= 1 << bit
            refused(bytes(damaged))


def test_bytes_after_the_end() -> None:
    refused(DELTA + b"\0")
    refused(DELTA + DELTA)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_bytes_in_place_of_others_under_a_right_checksum(data: st.DataObject) -> None:
    """Whoever makes the file makes the checksum too. Refused, or what the delta names is reached; never a mixture."""
    body = bytearray(DELTA[:-CHECK_BYTES])
    at = data.draw(st.integers(0, len(body) - 1))
    put = data.draw(st.binary(min_size=1, max_size=6))
    body[at : at + len(put)] = put[: len(body) - at]
    held = copy(BASE)
    try:
        apply_delta(held, sealed(bytes(body)), threads=1)
    except AstraFlowError:
        assert same(held, BASE)
    else:
        assert same(held, NEW)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_stream(data: st.DataObject) -> None:
    """pcodec reads whatever comes: what it makes of it, a panic for example, is one error of ours."""
    header, index, streams = parts_of(DELTA)
    which = data.draw(st.sampled_from(["gaps", "values", "whole"]))
    junk = data.draw(st.lists(st.binary(max_size=24), min_size=2, max_size=2))
    entries = index[1]
    entry, other = entries
    sizes = [len(each) for each in junk]
    if which == "whole":
        other[4] = sizes
        streams = streams[: sum(entry[4]) + sum(entry[5])] + b"".join(junk)
    elif which == "values":
        head = sum(entry[5])
        streams = streams[:head] + b"".join(junk) + streams[head + sum(entry[4]) :]
        entry[4] = sizes
    else:
        streams = b"".join(junk) + streams[sum(entry[5]) :]
        entry[5] = sizes
    refused(assembled(header["__metadata__"], zlib.compress(msgspec.msgpack.encode(index)), streams))


def change_entry(number: int, field: int, value: Any) -> Callable[[dict[str, Any], Any], None]:
    def change(metadata: dict[str, Any], index: Any) -> None:
        index[1][number][field] = value

    return change


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (0, "w"),  # twice
        (0, "elsewhere"),
        (0, 7),
        (1, "U32"),
        (1, "F99"),
        (2, [61]),
        (2, [30, 2]),
        (2, [1 << 40, 1 << 7]),
        (2, [1 << 62, 4]),
        (2, [-60, -1]),
        (2, [1] * 17 + [60]),
        (3, 0),
        (3, 2),
        (3, 61),
        (3, 1 << 47),
        (4, []),
        (4, [1, 1, 1]),
        (4, [-1, 1]),
        (4, [1 << 50, 1]),
        (5, []),
        (6, b"x"),
        (7, ["w"]),
        (7, ["a"]),
        (7, ["nobody"]),
    ],
)
def test_an_index_that_lies(field: int, value: Any) -> None:
    refused(remade(change_entry(0, field, value)), error=WeightsRefused)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", "astraflow delta 3"),
        ("base_xxh3", "0" * 64),
        ("base_xxh3", ""),
        ("base_xxh3", "0" * 63 + "G"),
        ("target_xxh3", "0" * 64),
        ("base", "short"),
        ("tensors", "3"),
        ("changed", "4"),
        ("whole", "-1"),
        ("whole", "9" * 400),
        ("changed", 3),
    ],
)
def test_a_header_that_lies(key: str, value: Any) -> None:
    def change(metadata: dict[str, Any], index: Any) -> None:
        metadata[key] = value

    refused(remade(change))


def test_a_target_that_is_not_reached_is_taken_back() -> None:
    """Everything is in order but where it leads."""

    def change(metadata: dict[str, Any], index: Any) -> None:
        metadata["target_xxh3"] = "0" * 64

    refused(remade(change), error=DigestMismatch, words="does not lead to the weights that it names")


def test_positions_outside_of_the_tensor() -> None:
    """A gap that points behind the end: found before that page is written, and earlier pages are taken back."""
    wide = {"w": np.zeros(100_000, np.uint16)}
    new = copy(wide)
    new["w"][np.arange(0, 60_000, 6)] = 1
    delta = parse(encode_delta(wide, new))
    (entry,) = delta.entries
    narrow = {"w": np.zeros(59_000, np.uint16)}  # the last of the three pages is half outside
    shrunk = msgspec.structs.replace(entry, shape=(59_000,))
    refused(lie(delta, shrunk, narrow), base=narrow, error=WeightsRefused, words="outside of it")


def lie(delta: Delta, entry: Entry, base: Weights) -> bytes:
    """A delta with this entry that claims to start from ``base``."""
    from astraflow.weights.digest import quick_digest
    from astraflow.weights.tensors import of_array

    own = quick_digest([of_array(name, array) for name, array in base.items()])
    return build(("", "", own, "1" * 64), pcodec_header(), [(entry, [bytes(delta.data)])])


def test_an_index_that_unpacks_to_more_than_is_allowed() -> None:
    header, _, data = parts_of(DELTA)
    bomb = zlib.compress(b"\0" * (1 << 28), 9)
    tracemalloc.start()
    try:
        refused(assembled(header["__metadata__"], bomb, data), error=WeightsRefused, words="takes more than")
        assert tracemalloc.get_traced_memory()[1] < 3 * MAX_INDEX_BYTES
    finally:
        tracemalloc.stop()


def test_claims_of_size_allocate_nothing() -> None:
    """Terabytes in the index of a small file: what would make them consistent takes an index that is too long."""
    _, index, _ = parts_of(DELTA)
    huge = 1 << 40
    assert huge // 4 // PAGE > MAX_INDEX_BYTES  # pages of a stream
    index[1][0][2:6] = [[huge], huge // 4, [1, 0], [1, 0]]
    header, _, data = parts_of(DELTA)
    liar = assembled(header["__metadata__"], zlib.compress(msgspec.msgpack.encode(index)), data)
    tracemalloc.start()
    try:
        refused(liar, error=WeightsRefused)
        with pytest.raises(WeightsRefused):
            merge_deltas(liar, liar)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_merging_has_a_limit() -> None:
    back = encode_delta(NEW, BASE)
    with pytest.raises(WeightsRefused, match="merging would take"):
        merge_deltas(DELTA, back, limit_bytes=10)
    assert read_header(merge_deltas(DELTA, back)).changed == 0


def test_other_files_are_no_deltas() -> None:
    for other in (b"", b"\0" * 8, b"PK\3\4" + b"\0" * 100, struct.pack("<Q", 1 << 40) + b"{}" * 50, DELTA[8:]):
        refused(other)
    refused(assembled(None, b"", b""))
    refused(assembled({"format": "astraflow delta 2"}, b"x", b"", check=CHECK_BYTES))
    refused(sealed(struct.pack("<Q", 2) + b"{}"))
