"""A delta with classes of magnitude that lies: an error of ours, and not a bit of the base is changed."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.errors import AstraFlowError, DigestMismatch, WeightsRefused
from astraflow.weights import delta_compact
from astraflow.weights.delta import apply_delta, compact_delta, encode_delta
from astraflow.weights.delta_file import CHECK_BYTES, PAGE
from tests.hostile.test_delta_bytes import assembled, parts_of, sealed
from tests.unit.weights.arrays import Weights, moved, same

ENTRIES, SCHEMES = 1, 2


def small() -> tuple[Weights, Weights, bytes]:
    base, new = moved(900, lr=3e-5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_compact, "WORTH", 1e9)
        patch.setattr(delta_compact, "WIDEST", 0.5)
        return base, new, compact_delta(encode_delta(base, new), new)


BASE, NEW, DELTA = small()


def held() -> Weights:
    return {name: tensor._replace(data=tensor.data.copy()) for name, tensor in BASE.items()}


def refused(delta: bytes, *, error: type[Exception] = AstraFlowError, words: str = "delta") -> None:
    own = held()
    with pytest.raises(error, match=words):
        apply_delta(own, delta, threads=1)
    assert same(own, BASE)


def remade(change: Callable[[dict[str, Any], Any], None]) -> bytes:
    header, index, data = parts_of(DELTA)
    change(header["__metadata__"], index)
    return assembled(header["__metadata__"], zlib.compress(msgspec.msgpack.encode(index)), data)


def test_the_small_delta_is_good_as_it_is() -> None:
    apply_delta(own := held(), remade(lambda metadata, index: None))
    assert same(own, NEW)
    _, index, _ = parts_of(DELTA)
    assert all(part[0] for entry in index[ENTRIES] for part in entry[8]), "every class of every tensor has changes"


def test_cut_off_and_flipped_bits() -> None:
    for end in range(0, len(DELTA), 7):
        refused(DELTA[:end])
    for at in range(0, len(DELTA), 3):
        damaged = bytearray(DELTA)
        damaged[at] ^= 1 << at % 8
        refused(bytes(damaged))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_bytes_in_place_of_others_under_a_right_checksum(data: st.DataObject) -> None:
    """Refused, or what the delta names is reached; never a mixture."""
    body = bytearray(DELTA[:-CHECK_BYTES])
    at = data.draw(st.integers(0, len(body) - 1))
    put = data.draw(st.binary(min_size=1, max_size=6))
    body[at : at + len(put)] = put[: len(body) - at]
    own = held()
    try:
        apply_delta(own, sealed(bytes(body)), threads=1)
    except AstraFlowError:
        assert same(own, BASE)
    else:
        assert same(own, NEW)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1), st.integers(0, 5), st.binary(max_size=40))
def test_any_stream_in_place_of_another(entry: int, stream: int, junk: bytes) -> None:
    header, index, data = parts_of(DELTA)
    at = 0
    for number, each in enumerate(index[ENTRIES]):
        for place in range(6):
            pages = each[8][place // 2][1 + place % 2]
            if (number, place) == (entry, stream):
                data = data[:at] + junk + data[at + sum(pages) :]
                pages[:] = [len(junk)]
            at += sum(pages)
    refused(assembled(header["__metadata__"], zlib.compress(msgspec.msgpack.encode(index)), data))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([2, 3]), st.integers(0, 2), st.binary(max_size=40))
def test_any_metadata_of_a_class(kind: int, number: int, junk: bytes) -> None:
    def change(metadata: dict[str, Any], index: Any) -> None:
        index[SCHEMES][0][kind][number] = junk

    own = held()
    try:
        apply_delta(own, remade(change), threads=1)
    except AstraFlowError:
        assert same(own, BASE)
    else:
        assert same(own, NEW)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (0, "F99"),
        (0, "I16"),
        (0, "F32"),  # then bf16 has none
        (1, []),
        (1, [0, 5]),
        (1, [9, 9]),
        (1, [900, 9]),
        (1, [9, 1 << 15]),
        (1, [-1, 9]),
        (1, list(range(1, 9))),
        (2, []),
        (3, [b"", b""]),
        (2, 7),
    ],
)
def test_a_scheme_that_lies(field: int, value: Any) -> None:
    def change(metadata: dict[str, Any], index: Any) -> None:
        index[SCHEMES][0][field] = value

    refused(remade(change), error=WeightsRefused)


@pytest.mark.parametrize("edges", [[1, 2], [5, 0x3000], [0x7FFE, 0x7FFF]])
def test_edges_that_are_not_those_it_was_made_with(edges: list[int]) -> None:
    """Ranks then point outside of their class, changes leave it, or it leads elsewhere."""

    def change(metadata: dict[str, Any], index: Any) -> None:
        index[SCHEMES][0][1] = edges

    refused(remade(change), words="outside of its class|leaves its class|does not lead to")


def test_a_class_that_is_left_is_found_before_its_block_is_written() -> None:
    """Two classes swap their values: a small weight moves by as much as a large one."""
    base = {name: tensor._replace(data=np.zeros_like(tensor.data)) for name, tensor in BASE.items()}
    bits = {name: tensor.data.view(np.uint16) for name, tensor in base.items()}
    for each in bits.values():
        each[:] = 0x3000
        each[:40] = 0x10FF
    new = {name: tensor._replace(data=tensor.data.copy()) for name, tensor in base.items()}
    for tensor in new.values():
        tensor.data.view(np.uint16)[:30] -= 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_compact, "WORTH", 1e9)
        patch.setattr(delta_compact, "_edges", lambda counts, now_bytes, dtype: (0x1000, 0x1100))
        delta = compact_delta(encode_delta(base, new), new)
    header, index, data = parts_of(delta)
    index[SCHEMES][0][1] = [0x1000, 0x10FF + 1]
    good = assembled(header["__metadata__"], zlib.compress(msgspec.msgpack.encode(index)), data)
    index[SCHEMES][0][1] = [0x10FF, 0x1100]  # -1 now leads from the second class to the first
    bad = assembled(header["__metadata__"], zlib.compress(msgspec.msgpack.encode(index)), data)
    own = {name: tensor._replace(data=tensor.data.copy()) for name, tensor in base.items()}
    with pytest.raises(WeightsRefused, match="leaves its class"):
        apply_delta(own, bad)
    assert same(own, base)
    apply_delta(own, good)
    assert same(own, new)


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry[8].pop(),
        lambda entry: entry[8].append([0, [], []]),
        lambda entry: entry[8][0].__setitem__(0, entry[8][0][0] + 1),
        lambda entry: entry[8][0].__setitem__(0, 0),
        lambda entry: entry[8][0].__setitem__(0, PAGE + 1),
        lambda entry: entry[8][1][1].append(0),
        lambda entry: entry.__setitem__(4, [1]),
        lambda entry: entry.__setitem__(5, [1]),
        lambda entry: entry.__setitem__(6, b"x" * 16),
        lambda entry: entry.__setitem__(1, "U16"),
        lambda entry: entry.__setitem__(2, [1 << 33]),
    ],
)
def test_an_index_that_lies(change: Callable[[Any], object]) -> None:
    refused(remade(lambda metadata, index: change(index[ENTRIES][0]) and None), error=WeightsRefused)


def test_a_scheme_that_occurs_twice() -> None:
    refused(remade(lambda metadata, index: index[SCHEMES].append(index[SCHEMES][0])), error=WeightsRefused)


def test_a_target_that_is_not_reached_is_taken_back() -> None:
    def change(metadata: dict[str, Any], index: Any) -> None:
        metadata["target_xxh3"] = "0" * 64

    refused(remade(change), error=DigestMismatch, words="does not lead to the weights that it names")


def test_claims_of_size_allocate_nothing() -> None:
    def change(metadata: dict[str, Any], index: Any) -> None:
        huge = (1 << 32) - 1
        index[ENTRIES][0][2:4] = [[huge], huge // 4]
        index[ENTRIES][0][8][0] = [huge // 4, [0] * (huge // 4 // PAGE + 1), [0] * (huge // 4 // PAGE + 1)]

    liar = remade(change)
    tracemalloc.start()
    try:
        refused(liar)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
