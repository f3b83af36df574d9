"""Every endpoint over the real HTTP server and the real service: whatever is sent gets an answer of ours, a refusal is
one sentence that changes no row, and nothing that was sent is kept."""

from __future__ import annotations

import gc
import gzip
import io
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yarl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astraflow.wire.calls import CALLS, Role
from astraflow.wire.codec import encode
from tests.conformance.test_dataflow import real_manifest
from tests.hostile.site import HostileSite, pack, undone
from tests.unit.dataflow import rig as rigs

NAMES = sorted(CALLS)
OTHERS: list[Any] = [None, True, "x", b"\x00", [], {}, [[]], 1.5, -1, {"x": 1}, msgspec.msgpack.Ext(1, b"\x0b\x01")]
NUMBERS = [-(2**63), -1, 0, 1, 7, 2**31, 2**63 - 1, 2**63, 2**64 - 1]
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostileSite]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rigs, "manifest", real_manifest)
        found = HostileSite(tmp_path_factory.mktemp("weights"))
        yield found
        found.close()


def wire_of(site: HostileSite, name: str) -> Any:
    """The right request of a call as plain maps and lists."""
    return msgspec.msgpack.decode(encode(site.good[name]))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every place in a message and what stands there."""
    yield path, value
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


def send(site: HostileSite, name: str, body: bytes) -> int:
    """Answered by us; if refused, then without any change. What it did is taken back."""
    with undone(site.rig):
        before = site.dump()
        answer = site.check(site.post(name, body), before)
        site.rig.balanced()
        if name == "submit":  # what was accepted must be settled and cut like any other
            assert not site.rig.service.ledger.groups.any_ready
            assert site.rig.service.ledger.state == "running"
        return answer.status


@pytest.mark.parametrize("name", NAMES)
def test_the_right_request_is_right(site: HostileSite, name: str) -> None:
    """Or nothing below would mean anything."""
    assert send(site, name, encode(site.good[name])) == 200


@pytest.mark.parametrize("name", NAMES)
def test_every_number_at_every_place(site: HostileSite, name: str) -> None:
    wire = wire_of(site, name)
    for path, value in places(wire):
        if isinstance(value, int) and not isinstance(value, bool):
            for number in NUMBERS:
                send(site, name, pack(replaced(wire, path, number)))


@pytest.mark.parametrize("name", NAMES)
def test_every_place_of_another_type_or_missing(site: HostileSite, name: str) -> None:
    wire = wire_of(site, name)
    for path, value in places(wire):
        for other in OTHERS:
            if type(other) is not type(value):
                send(site, name, pack(replaced(wire, path, other)))
        if isinstance(value, dict):
            for key in value:
                send(site, name, pack(replaced(wire, path, {k: v for k, v in value.items() if k != key})))


TEXTS = ["", "\x00", "../../x", "x" * 5000, "ä\u202e\n\r\t", "'; DROP TABLE episodes; --", "1/2/3", "nan"]


@pytest.mark.parametrize("name", NAMES)
def test_every_text_at_every_place(site: HostileSite, name: str) -> None:
    wire = wire_of(site, name)
    for path, value in places(wire):
        if isinstance(value, str):
            for text in TEXTS:
                send(site, name, pack(replaced(wire, path, text)))


@FUZZ
@given(st.data(), st.sampled_from(NAMES))
def test_mutated_bytes(site: HostileSite, data: Any, name: str) -> None:
    body = bytearray(encode(site.good[name]))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(body) - 1)))
        match data.draw(st.sampled_from(["set", "cut", "insert", "repeat"])):
            case "set" if body:
                body[at] = data.draw(st.integers(0, 255))
            case "cut":
                del body[at : at + data.draw(st.integers(1, 8))]
            case "insert":
                body[at:at] = data.draw(st.binary(min_size=1, max_size=8))
            case _:
                body += body[at : at + 16]
    send(site, name, bytes(body))


@FUZZ
@given(st.binary(max_size=300), st.sampled_from(NAMES))
def test_noise(site: HostileSite, body: bytes, name: str) -> None:
    send(site, name, body)


@pytest.mark.parametrize("name", NAMES)
def test_huge_lengths_and_deep_nesting(site: HostileSite, name: str) -> None:
    field = encode(site.good[name])[1:]
    heads = [bytes([kind]) + b"\xff\xff\xff\xff" for kind in (0xC6, 0xC9, 0xDB, 0xDD, 0xDF)]
    deep = [opening * 200_000 for opening in (b"\x91", b"\x81\xa1x", b"\xdd\x00\x00\x00\x01")]
    assert send(site, name, b"\x81\xa1x" + b"\xdc\xff\xff" + b"\xc0" * 65_535) < 500
    for inner in (*heads, *deep, b"\x91" * 50_000 + b"\xc0"):
        for body in (inner, b"\x81\xa1x" + inner, b"\x81" + field[: field[0] - 0xA0 + 1] + inner):
            assert send(site, name, body) in (400, 413), (name, body[:12])


# ── who may ──


def test_wrong_tokens_change_nothing(site: HostileSite) -> None:
    before = site.dump()
    for name, call in CALLS.items():
        body = encode(site.good[name])
        for token in (None, "x" * 43, site.token(name)[:-1], site.token(name) + "x", "ä" * 20):
            if token is None or token.isascii():
                assert site.check(site.post(name, body, token), before).status == 401
        for role in set(Role) - call.roles:
            assert site.check(site.post(name, body, site.tokens.of(role, "p")), before).status == 403
        basic = site.post(name, body, None, headers={"Authorization": f"Basic {site.token(name)}"})
        assert site.check(basic, before).status == 401


# ── what one request may cost ──


def test_a_compressed_body_is_limited_by_what_it_unpacks_to(site: HostileSite) -> None:
    bomb = gzip.compress(bytes(256 << 20), compresslevel=1)
    before = site.dump()
    tracemalloc.start()
    try:
        answer = site.post("renew", bomb, headers={"Content-Encoding": "gzip"})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 400 <= site.check(answer, before).status < 500
    assert peak < 80 << 20, f"{peak >> 20} MiB for a body of {len(bomb) >> 10} KiB"
    for encoding in ("gzip", "deflate", "br", "zstd", "x"):
        torn = site.post("renew", b"\x1f\x8b not really", headers={"Content-Encoding": encoding})
        assert 400 <= site.check(torn, before).status < 500


def test_refused_calls_leave_no_memory_behind(site: HostileSite) -> None:
    bodies = [b"\xc1", b"\x81\xa1x" + b"\x91" * 5000, pack({"policy": "p" * 100}), b"\xdd" + b"\x00" * 60_000]

    def storm(times: int) -> None:
        for at in range(times):
            for name in NAMES:
                site.post(name, bodies[at % len(bodies)] + bytes([at % 256]))

    storm(8)
    gc.collect()
    tracemalloc.start()
    try:
        began = tracemalloc.get_traced_memory()[0]
        storm(24)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - began
    finally:
        tracemalloc.stop()
    assert grown < 300_000, f"{grown} bytes are held after {24 * len(NAMES)} refused calls"


def test_names_that_are_made_up_do_not_pile_up(site: HostileSite) -> None:
    """Whoever may report may not fill the table of components with kinds that do not exist."""
    before = site.dump()
    for index in range(5):
        wire = {**wire_of(site, "report"), "component": f"kind{index}"}
        assert site.check(site.post("report", pack(wire)), before).status == 400


# ── weight files ──


@pytest.mark.parametrize("sha256", ["..%2f..%2fetc%2fpasswd", "x", "A" * 64, "0" * 63, "%00", "0" * 5000])
def test_f94_weight_files_have_no_other_names(site: HostileSite, sha256: str, tmp_path: Path) -> None:
    for method in ("GET", "HEAD", "PUT"):
        status, _ = blob(site, method, sha256, b"x")
        assert 400 <= status < 500, (method, status)


def test_uploads_that_are_not_what_they_say_leave_no_file(site: HostileSite) -> None:
    for body in (b"", b"x" * 1000, bytes(2 << 20)):
        status, _ = blob(site, "PUT", "ab" * 32, body)
        assert status in (400, 413)
    assert blob(site, "GET", "ab" * 32, b"")[0] == 404
    assert blob(site, "PUT", "ab" * 32, b"x", token=site.tokens.worker)[0] == 403
    assert blob(site, "GET", "ab" * 32, b"", token="x" * 43)[0] == 401


def blob(site: HostileSite, method: str, sha256: str, body: bytes, *, token: str = "") -> tuple[int, bytes]:
    async def send_it() -> tuple[int, bytes]:
        assert site.session is not None
        url = yarl.URL(f"{site.server.url}/v1/weights/{sha256}", encoded=True)
        headers = {"Authorization": f"Bearer {token or site.tokens.of(Role.TRAINER, 'p')}"}
        async with site.session.request(method, url, data=io.BytesIO(body), headers=headers) as response:
            return response.status, await response.read()

    return site.rig.go(send_it())
