"""Bytes of strangers: every decoder ends in a record or in an error of our tree, within bounded memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.errors import AstraFlowError, BadRequest
from astraflow.wire.codec import decode, encode
from astraflow.wire.names import require_manifest, require_name, require_names, require_sha256
from astraflow.wire.scan import require_bounded
from tests.golden.examples import EXAMPLES

KINDS = {name: type(example) for name, example in EXAMPLES.items()}


def decode_or_refuse(data: bytes, kind: type[Any]) -> Any:
    try:
        return decode(data, kind)
    except BadRequest as error:
        text = str(error)
        assert text and "\n" not in text and len(text) < 500
        return None


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(sorted(KINDS)))
def test_noise(data: bytes, name: str) -> None:
    decode_or_refuse(data, KINDS[name])


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from(sorted(KINDS)))
def test_mutated_messages(data: Any, name: str) -> None:
    good = bytearray(encode(EXAMPLES[name]))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(good) - 1)))
        action = data.draw(st.sampled_from(["set", "cut", "insert", "repeat"]))
        if action == "set" and good:
            good[at] = data.draw(st.integers(0, 255))
        elif action == "cut":
            del good[at : at + data.draw(st.integers(1, 8))]
        elif action == "insert":
            good[at:at] = data.draw(st.binary(min_size=1, max_size=8))
        else:
            good += good[at : at + 16]
    found = decode_or_refuse(bytes(good), KINDS[name])
    if found is not None:
        encode(found)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text("ab") | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from(sorted(KINDS)), VALUES)
def test_well_formed_messages_of_the_wrong_shape(data: Any, name: str, value: Any) -> None:
    wire = msgspec.msgpack.decode(encode(EXAMPLES[name]))
    if wire:
        wire[data.draw(st.sampled_from(sorted(wire) if isinstance(wire, dict) else range(len(wire))))] = value
    decode_or_refuse(msgspec.msgpack.encode(wire), KINDS[name])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_scan_ends_for_any_bytes(data: bytes) -> None:
    try:
        require_bounded(data, "x", elements=1000, depth=8)
    except BadRequest:
        return


@pytest.mark.parametrize("name", ["SubmitRequest", "BatchReply", "LeaseReply", "EventsReply"])
@pytest.mark.parametrize("unit", [b"\x80", b"\xc0", b"\xa1a", b"\x91\x91\xc0"])
def test_memory_is_bounded_by_the_message(name: str, unit: bytes) -> None:
    """Every field of the record filled with as many small things as fit."""
    kind = KINDS[name]
    count = (48 << 10) // len(unit)
    for field in kind.__struct_fields__:
        for head in (b"\xdd", b"\xdf"):
            body = head + (count // (1 + (head == b"\xdf"))).to_bytes(4, "big") + unit * count
            data = b"\x81" + msgspec.msgpack.encode(field) + body
            tracemalloc.start()
            try:
                decode_or_refuse(data, kind)
                assert tracemalloc.get_traced_memory()[1] < 200 * len(data)
            finally:
                tracemalloc.stop()


WILD = [
    "../../etc/passwd",
    "/abs",
    "a/../../b",
    "..%2f..",
    "m0\x00",
    "CON",
    "con.txt",
    "x" * 5000,
    "",
    ".",
    "..",
    "a\n",
]
WILD += ["ä", "a b", "nul", "COM1", "a\\b", "~", "\u202e", "x" * 129]


@pytest.mark.parametrize("name", WILD)
def test_f94_wild_names_are_refused(name: str) -> None:
    with pytest.raises(BadRequest, match=r"Thing must match"):
        require_name(name, "Thing")


@pytest.mark.parametrize("name", ["p", "x" * 128, "SmolLM2-135M.v1_x", "-", "...", "console", "com10"])
def test_f94_tame_names_pass(name: str) -> None:
    assert require_name(name, "Thing") == name


@pytest.mark.parametrize("wild", ["../x", "", "a/b"])
def test_f94_every_name_in_a_request_is_checked(wild: str) -> None:
    replaced = 0
    for example in EXAMPLES.values():
        for field in ("policy", "worker", "name", "trainer", "incarnation", "component"):
            if type(example).__name__.endswith("Request") and field in example.__struct_fields__:
                with pytest.raises(BadRequest, match=field):
                    require_names(msgspec.structs.replace(example, **{field: wild}))
                replaced += 1
    assert replaced > 15
    capabilities = msgspec.structs.replace(EXAMPLES["Capabilities"], policies=("p", wild))
    with pytest.raises(BadRequest, match="policies"):
        require_names(msgspec.structs.replace(EXAMPLES["LeaseRequest"], capabilities=capabilities))


@pytest.mark.parametrize("field", ["name", "sha256", "size_bytes"])
def test_f94_manifests_name_only_files_that_stay_in_the_folder(field: str) -> None:
    file = EXAMPLES["WeightFile"]
    wild = msgspec.structs.replace(file, **{field: -1 if field == "size_bytes" else "../../.ssh/id"})
    for files in ((wild,), (file, file)):
        manifest = msgspec.structs.replace(EXAMPLES["Manifest"], files=files)
        with pytest.raises(BadRequest):
            require_manifest(manifest)
        with pytest.raises(BadRequest):
            require_names(msgspec.structs.replace(EXAMPLES["CommitRequest"], manifest=manifest))


@pytest.mark.parametrize("field", ["files_digest", "form"])
def test_digests_of_a_manifest_are_digests_or_not_there(field: str) -> None:
    require_manifest(msgspec.structs.replace(EXAMPLES["Manifest"], **{field: ""}))
    with pytest.raises(BadRequest, match=f"Manifest.{field} must be 64 lower-case hexadecimal digits"):
        require_manifest(msgspec.structs.replace(EXAMPLES["Manifest"], **{field: "../x"}))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=150))
def test_names_and_hashes_refuse_in_one_sentence(text: str) -> None:
    for check in (require_name, require_sha256):
        try:
            assert check(text, "x") == text
        except AstraFlowError as error:
            assert len(str(error)) < 400 and "\n" not in str(error)
