"""Records survive the wire exactly, and what cannot travel says so by its path."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from astraflow.errors import BadRequest, InvalidRecord, TooLarge
from astraflow.types import Record, Sample, Span, Task, Turn
from astraflow.wire import messages as m
from astraflow.wire.codec import DTYPES, decode, encode, pack_array, unpack_array
from astraflow.wire.scan import require_bounded
from tests.golden.examples import EPISODE, EXAMPLES, SAMPLE
from tests.unit.wire.equal import assert_same


def round_trip(record: Any) -> Any:
    return decode(encode(record), type(record))


# ── F95: numbers do not change on the wire ──


@settings(deadline=None, max_examples=60)
@given(
    hnp.arrays(
        st.sampled_from([np.dtype(d) for d in DTYPES.values()]),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    )
)
def test_f95_arrays_keep_bits_dtype_and_shape(array: Any) -> None:
    task = round_trip(Task(key="k", features={"x": array}))
    assert_same(task.features["x"], array)


PAYLOADS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc") | st.integers(0, 9), inner, max_size=4),
    max_leaves=20,
)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.text("abcß"), PAYLOADS, max_size=5))
def test_f95_payloads_round_trip(payload: dict[str, Any]) -> None:
    assert_same(round_trip(Task(key="k", payload=payload)).payload, payload)


def test_f95_named_values() -> None:
    payload = {"seed": 2**63 - 1, "id": 151645, "p": -0.0000001234567, "map": {1: "a"}, "bytes": b"\x00", "zero": -0.0}
    assert_same(round_trip(Task(key="k", payload=payload)).payload, payload)
    empty = round_trip(Task(key="k", features={"ids": np.zeros((0, 2), np.int64)})).features["ids"]
    assert empty.dtype == np.int64 and empty.shape == (0, 2)


@settings(deadline=None, max_examples=60)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_f95_floats_round_trip_in_full(value: float) -> None:
    assert np.float64(round_trip(Turn(index=0, sample=0, start=0, stop=1, reward=value)).reward).tobytes() == (
        np.float64(value).tobytes()
    )


def test_f95_a_float_is_never_an_id() -> None:
    with pytest.raises(InvalidRecord, match=r"after"):
        decode(msgspec.msgpack.encode({"after": 3.0}), m.EventsRequest)


def test_f95_two_lengths_are_never_cut_to_the_shorter() -> None:
    wire = msgspec.msgpack.decode(encode(SAMPLE))
    with pytest.raises(InvalidRecord, match="one length"):
        decode(msgspec.msgpack.encode({**wire, "tokens": _ext(np.zeros(3, np.int32))}), Sample)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_every_record_round_trips(name: str) -> None:
    assert_same(round_trip(EXAMPLES[name]), EXAMPLES[name])


def test_numpy_scalars_travel_as_numbers() -> None:
    report = m.ComponentReport(metrics={"a": np.float32(0.5), "b": np.float64(0.1), "c": np.int64(3)})
    assert round_trip(report).metrics == {"a": 0.5, "b": 0.1, "c": 3.0}


def test_an_older_program_understands_a_newer_record() -> None:
    data = msgspec.msgpack.encode({"after": 3, "limit": 4, "invented_later": [1, {"a": 2}]})
    assert decode(data, m.EventsRequest) == m.EventsRequest(after=3, limit=4)


# ── F93: a number that is a reward or a metric is finite ──


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_f93_encoder_refuses_non_finite_with_the_path(value: float) -> None:
    with pytest.raises(InvalidRecord, match=r"ReportRequest\.report\.metrics\['loss'\] must be finite"):
        encode(
            m.ReportRequest(
                component="trainer",
                name="t",
                incarnation="i",
                report=m.ComponentReport(metrics={"a": 1.0, "loss": value}),
            )
        )
    with pytest.raises(InvalidRecord, match=r"LeaseRequest\.wait_s must be finite"):
        encode(
            m.LeaseRequest(worker="w", incarnation="i", count=1, wait_s=value, capabilities=m.Capabilities(policies=()))
        )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_f93_decoder_refuses_non_finite_with_the_path(value: float) -> None:
    wire = msgspec.msgpack.decode(encode(EPISODE))
    with pytest.raises(InvalidRecord, match=r"Episode\.metrics\['x'\]"):
        decode(msgspec.msgpack.encode({**wire, "metrics": {"x": value}}), type(EPISODE))
    with pytest.raises(InvalidRecord, match=r"Episode.score must be finite"):
        decode(msgspec.msgpack.encode({**wire, "score": value}), type(EPISODE))
    turn = {**wire["trajectories"][0]["turns"][0], "reward": value}
    trajectory = {**wire["trajectories"][0], "turns": [turn]}
    with pytest.raises(InvalidRecord, match=r"trajectories\[0\]\.turns\[0\]"):
        decode(msgspec.msgpack.encode({**wire, "trajectories": [trajectory]}), type(EPISODE))


def test_f93_log_prob_of_a_sampled_token_is_finite_and_null_is_not_zero() -> None:
    wire = msgspec.msgpack.decode(encode(SAMPLE))
    broken = np.array([0, 0, -0.1, -np.inf, np.nan, 0], np.float32)
    with pytest.raises(InvalidRecord, match=r"logprobs must be finite"):
        decode(msgspec.msgpack.encode({**wire, "logprobs": _ext(broken)}), Sample)
    with pytest.raises(InvalidRecord):
        decode(msgspec.msgpack.encode({**wire, "logprobs": None}), Sample)


def test_f93_batch_advantages_are_finite() -> None:
    batch = EXAMPLES["BatchReply"]
    wire = msgspec.msgpack.decode(encode(batch))
    wire["batch"]["rows"][0]["advantages"] = [[2, 5, float("nan")]]
    with pytest.raises(InvalidRecord, match=r"BatchReply\.batch\.rows\[0\]\.advantages\[0\]\.value"):
        decode(msgspec.msgpack.encode(wire), m.BatchReply)


# ── arrays ──


def _ext(array: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(1, pack_array(array))


def test_arrays_are_read_only_aligned_views() -> None:
    for shift in range(9):
        record = Task(key="k" * shift, features={"x": np.arange(5, dtype=np.float64)})
        found = round_trip(record).features["x"]
        assert not found.flags.writeable and found.flags.aligned and found.flags.c_contiguous


def test_strided_arrays_travel_in_c_order() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4).T
    assert_same(round_trip(Task(key="k", features={"x": array})).features["x"], np.ascontiguousarray(array))


@pytest.mark.parametrize(
    "array",
    [np.zeros(2, ">i4"), np.zeros(2, np.complex64), np.array(["a"]), np.array([None]), np.zeros(2, "M8[s]")],
    ids=str,
)
def test_other_dtypes_are_refused(array: Any) -> None:
    with pytest.raises(InvalidRecord, match="dtype"):
        encode(Task(key="k", features={"x": array}))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x01",
        b"\x63\x01\x00\x00\x01\x00\x00\x00\x00",
        b"\x01\x09\x00\x00" + b"\x00" * 36,
        b"\x07\x01\x00\x00\x02\x00\x00\x00" + b"\x00" * 7,
        b"\x07\x01\x00\x00\x02\x00\x00\x00" + b"\x00" * 9,
        b"\x07\x01\x01\x00\x00\x00\x00\x00",
        b"\x07\x02\x00\x00\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x01\x01\x00\x00\x01\x00\x00\x00\x02",
        b"\x0c\x08\x00\x00" + b"\xff" * 28 + b"\x00" * 4,
    ],
    ids=["empty", "short", "dtype", "dims", "few", "many", "flags", "huge", "bool2", "zero-times-huge"],
)
def test_malformed_array_bodies(body: bytes) -> None:
    data = msgspec.msgpack.encode({"key": "k", "features": {"x": msgspec.msgpack.Ext(1, body)}})
    with pytest.raises(BadRequest):
        decode(data, Task)
    with pytest.raises(ValueError):
        unpack_array(body)


def test_an_array_field_holds_an_array() -> None:
    for value in (None, 3, "x", [1, 2], b"\x00" * 8, {"a": 1}):
        with pytest.raises(InvalidRecord):
            decode(msgspec.msgpack.encode({"key": "k", "features": {"x": value}}), Task)


def test_objects_and_other_extensions_are_refused() -> None:
    with pytest.raises(InvalidRecord, match="object of type object"):
        encode(Task(key="k", payload={"x": object()}))
    with pytest.raises(BadRequest, match="extension 7 is unknown"):
        decode(msgspec.msgpack.encode({"key": "k", "payload": {"x": msgspec.msgpack.Ext(7, b"\x00")}}), Task)
    with pytest.raises(InvalidRecord):
        encode(Task(key="\ud800"))
    with pytest.raises(InvalidRecord):
        encode(Task(key="k", payload={"x": 2**64}))
    loop: dict[str, Any] = {}
    loop["self"] = loop
    with pytest.raises(InvalidRecord):
        encode(Task(key="k", payload=loop))


# ── limits ──


def test_limit_on_bytes() -> None:
    data = encode(EPISODE)
    assert_same(decode(data, type(EPISODE), limit_bytes=len(data)), EPISODE)
    with pytest.raises(TooLarge, match=f"Episode of {len(data)} bytes is over the limit"):
        decode(data, type(EPISODE), limit_bytes=len(data) - 1)


def test_limit_on_nesting() -> None:
    deep = b"\x82\xa3key\xa1k\xa7payload\x81\xa1x" + b"\x91" * 200_000 + b"\xc0"
    with pytest.raises(BadRequest, match="nested"):
        decode(deep, Task)
    with pytest.raises(BadRequest, match="nested"):
        decode(b"\x82\xa3key\xa1k\xa7payload\x81\xa1x" + b"\x91" * 50_000 + b"\xc0", Task)


def test_limit_on_elements_is_checked_before_anything_is_built() -> None:
    bomb = b"\x82\xa3key\xa1k\xa7payload\x81\xa1x\xdd" + (1 << 20).to_bytes(4, "big") + b"\x80" * (1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest, match="more than 50000 elements"):
            decode(bomb, Task, limit_elements=50_000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", [b"\xdd", b"\xdf"])
def test_announced_sizes_are_not_believed(kind: bytes) -> None:
    tail = kind + b"\xff\xff\xff\xff"
    padded = b"\x82\xa3key\xc6" + (1 << 17).to_bytes(4, "big") + b"k" * (1 << 17) + tail
    for data in (b"\x81\xa7payload" + tail, padded):
        with pytest.raises(BadRequest):
            decode(data, Task)


@settings(deadline=None, max_examples=60)
@given(PAYLOADS)
def test_scan_agrees_with_the_decoder_on_good_messages(payload: Any) -> None:
    data = msgspec.msgpack.encode([payload, np.float64(1.0).item()])
    require_bounded(data, "x", depth=1000)


def test_sentences_are_short_single_lines() -> None:
    data = msgspec.msgpack.encode({"task_key": "k", "outcome": "a\nb\x00" * 1000})
    with pytest.raises(InvalidRecord) as caught:
        decode(data, type(EPISODE))
    text = str(caught.value)
    assert len(text) < 400 and "\n" not in text and text.isprintable()


def test_f4096_tokens_take_microseconds() -> None:
    length = 4096
    sample = Sample(
        tokens=np.arange(length, dtype=np.int32),
        sampled=np.arange(length) > 0,
        logprobs=-(np.arange(length) > 0).astype(np.float32),
        spans=(Span(start=1, stop=length, version=1, digest="d" * 64),),
    )
    data = encode(sample)
    assert len(data) < 9 * length + 400
    began = time.perf_counter()
    for _ in range(100):
        decode(encode(sample), Sample)
    # 35 µs here with the record's own checks; lists took 1,500. The bound only catches a change of kind.
    assert (time.perf_counter() - began) / 100 < 500e-6


class _Everything(Record, frozen=True, kw_only=True):
    maybe: float | None = None
    many: tuple[float, ...] = ()
    nested: dict[str, list[float]] = {}


@pytest.mark.parametrize(
    ("record", "path"),
    [
        (_Everything(maybe=float("nan")), r"\.maybe"),
        (_Everything(many=(1.0, float("inf"))), r"\.many\[1\]"),
        (_Everything(nested={"a": [1.0], "b": [0.0, float("nan")]}), r"\.nested\['b'\]\[1\]"),
    ],
)
def test_paths_of_every_shape(record: Record, path: str) -> None:
    with pytest.raises(InvalidRecord, match="_Everything" + path):
        encode(record)
    assert round_trip(_Everything(maybe=1.0)) == _Everything(maybe=1.0)
