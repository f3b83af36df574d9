"""Safetensors files of strangers: read or refused, never a crash, never more memory than the file."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.errors import WeightsRefused
from astraflow.weights.tensors import parse_tensors, read_tensors
from tests.unit.weights.files import model, raw_file

GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def parse(data: bytes) -> list[Any]:
    return list(parse_tensors(np.frombuffer(data, np.uint8), "file"))


def with_entry(**changes: Any) -> bytes:
    return raw_file({"a": {**GOOD["a"], **changes}}, b"\0" * 8)


def test_the_good_one_is_good() -> None:
    (tensor,) = parse(raw_file(GOOD, b"\0" * 8))
    assert (tensor.name, tensor.dtype, tensor.shape, len(tensor.data)) == ("a", "F32", (2,), 8)
    assert parse(raw_file({"__metadata__": {"x": "y"}})) == []


ATTACKS = {
    "empty": b"",
    "short": b"\x01\0\0",
    "header-longer-than-file": raw_file(GOOD, b"\0" * 8, size=10**6),
    "header-of-2**63": raw_file(GOOD, b"\0" * 8, size=2**63),
    "not-json": raw_file(b"{nope", b""),
    "not-utf8": raw_file(b"\xff\xfe", b""),
    "list": raw_file([1, 2]),
    "deep": raw_file(b"[" * 100_000),
    "key-twice": raw_file(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}'),
    "number": raw_file({"a": 1}),
    "no-dtype": raw_file({"a": {"shape": [2], "data_offsets": [0, 8]}}, b"\0" * 8),
    "more-keys": with_entry(extra=1),
    "unknown-dtype": with_entry(dtype="F128"),
    "dtype-number": with_entry(dtype=4),
    "shape-negative": with_entry(shape=[-2]),
    "shape-float": with_entry(shape=[2.0]),
    "shape-bool": with_entry(shape=[True, 2]),
    "shape-huge": with_entry(shape=[2**61, 8]),
    "shape-wrong": with_entry(shape=[3]),
    "shape-long": with_entry(shape=[1] * 17 + [2]),
    "offsets-one": with_entry(data_offsets=[0]),
    "offsets-backwards": with_entry(data_offsets=[8, 0]),
    "offsets-outside": with_entry(data_offsets=[8, 16]),
    "offsets-null": with_entry(data_offsets=None),
    "hole": raw_file({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, b"\0\0"),
    "rest": raw_file(GOOD, b"\0" * 9),
    "overlap": raw_file(
        {n: {"dtype": "U8", "shape": [2], "data_offsets": [o, o + 2]} for n, o in (("a", 0), ("b", 1))}, b"\0" * 3
    ),
    "same-bytes-twice": raw_file({"a": GOOD["a"], "b": GOOD["a"]}, b"\0" * 8),
}


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_attacks_are_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(ATTACKS[name])
    with pytest.raises(WeightsRefused) as caught:
        read_tensors(path)
    assert "file" in str(caught.value) and len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsRefused, match="cannot be read"):
        read_tensors(tmp_path / "none.safetensors")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=120))
def test_noise(data: bytes) -> None:
    try:
        parse(data)
    except WeightsRefused:
        return


def test_mutated_files(tmp_path: Path) -> None:
    good = (model(tmp_path) / "model.safetensors").read_bytes()
    rng = np.random.default_rng(0)
    read = 0
    for _ in range(500):
        broken = bytearray(good)
        for at in rng.integers(0, 400, rng.integers(1, 4)):
            broken[at] = rng.integers(0, 256)
        try:
            read += len(parse(bytes(broken))) > 0
        except WeightsRefused:
            continue
    assert read < 400


def test_a_tensor_that_says_it_is_huge_costs_nothing() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WeightsRefused):
            parse(with_entry(shape=[2**40], data_offsets=[0, 2**42]))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
