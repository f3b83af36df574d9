"""The bytes of wire v1 do not drift. After an addition: ``ASTRAFLOW_UPDATE_GOLDEN=1 pytest tests/golden`` once,
and ``python -m astraflow.wire.schema``; the first run then proves that what was written before is still understood.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from astraflow.wire import schema
from astraflow.wire.codec import decode, encode
from tests.golden.examples import EXAMPLES
from tests.unit.wire.equal import assert_same

FOLDER = Path(__file__).with_name("wire_v1")
UPDATE = os.environ.get("ASTRAFLOW_UPDATE_GOLDEN") == "1"


def test_every_record_has_an_example() -> None:
    assert sorted(EXAMPLES) == sorted(schema.records())


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_bytes_do_not_drift(name: str) -> None:
    path = FOLDER / f"{name}.msgpack"
    data = encode(EXAMPLES[name])
    if not path.exists() and UPDATE:
        FOLDER.mkdir(exist_ok=True)
        path.write_bytes(data)
    written = path.read_bytes()
    decode(written, type(EXAMPLES[name]))
    _assert_within(msgspec.msgpack.decode(written), msgspec.msgpack.decode(data), name)
    if UPDATE:
        path.write_bytes(data)
    elif written != data:
        pytest.fail(f"{name} has grown: run with ASTRAFLOW_UPDATE_GOLDEN=1 and commit tests/golden/wire_v1")


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_golden_bytes_decode_to_the_example(name: str) -> None:
    example = EXAMPLES[name]
    assert_same(decode(encode(example), type(example)), example)


def _assert_within(old: Any, new: Any, where: str) -> None:
    """Whatever was on the wire is still there with the same value; maps may have more keys, arrays a longer end."""
    assert type(old) is type(new), where
    if isinstance(old, dict):
        assert not set(old) - set(new), where
        for key, value in old.items():
            _assert_within(value, new[key], f"{where}.{key}")
    elif isinstance(old, list):
        assert len(old) <= len(new), where
        for index, value in enumerate(old):
            _assert_within(value, new[index], f"{where}[{index}]")
    else:
        assert old == new, where


def test_schema_only_grows() -> None:
    promised = msgspec.json.decode(schema.PATH.read_bytes())
    assert schema.breaks(promised, schema.describe()) == []


def test_committed_schema_is_the_code() -> None:
    promised = msgspec.json.decode(schema.PATH.read_bytes())
    assert promised == schema.describe(), "a record has grown: python -m astraflow.wire.schema, and commit the file"
