"""Every endpoint: right, malformed, too large, without a token, with another's token; one sentence each, no effect."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from astraflow.errors import ConfigError, Conflict, Fenced, StorageFull, Unavailable, by_kind
from astraflow.types import Episode
from astraflow.wire import messages as m
from astraflow.wire.calls import CALLS, RECORD_HEADER, Call, Role, WireError
from astraflow.wire.codec import decode, encode
from astraflow.wire.server import Server
from astraflow.wire.tokens import Tokens
from tests.golden.examples import EXAMPLES
from tests.unit.wire.double import ScriptedDataflow
from tests.unit.wire.equal import assert_same

NAMES = sorted(CALLS)


class Site:
    """A running server and a bare HTTP session."""

    def __init__(
        self, dataflow: ScriptedDataflow, server: Server, session: aiohttp.ClientSession, tokens: Tokens
    ) -> None:
        self.dataflow, self.server, self.session, self.tokens = dataflow, server, session, tokens

    def token(self, call: Call) -> str:
        return self.tokens.of(sorted(call.roles)[0], "p")

    async def post(self, name: str, body: bytes, token: str | None) -> tuple[int, str, bytes]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with self.session.post(
            f"{self.server.url}/v1/{name}", data=io.BytesIO(body), headers=headers
        ) as response:
            return response.status, response.headers.get(RECORD_HEADER, ""), await response.read()

    async def refused(self, name: str, body: bytes, token: str | None) -> tuple[int, WireError]:
        status, record, data = await self.post(name, body, token)
        assert record == "WireError" and status >= 400, (status, record)
        error = decode(data, WireError)
        assert error.kind in by_kind() and by_kind()[error.kind].status == status
        assert error.message and "\n" not in error.message and not error.message.endswith(".")
        for secret in (self.tokens.worker, self.tokens.operator, *self.tokens.trainers.values()):
            assert secret not in error.message
        return status, error


@asynccontextmanager
async def site(**settings: Any) -> AsyncIterator[Site]:
    tokens = Tokens.make(["p", "q"])
    dataflow = ScriptedDataflow()
    server = Server(dataflow, None, tokens=tokens, **settings)
    await server.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield Site(dataflow, server, session, tokens)
    finally:
        await server.close()


def run(scenario: Callable[[Site], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), site(**settings) as here:
            await scenario(here)

    asyncio.run(main())


def test_every_call_carries_its_records() -> None:
    async def scenario(here: Site) -> None:
        for name, call in CALLS.items():
            request = EXAMPLES[call.request.__name__]
            status, record, data = await here.post(name, encode(request), here.token(call))
            assert (status, record) == (200, call.reply.__name__), name
            assert_same(decode(data, call.reply), EXAMPLES[call.reply.__name__])
            assert_same(here.dataflow.seen[-1], request)

    run(scenario)


def test_malformed_bodies_are_400_and_change_nothing() -> None:
    bodies = [
        b"",
        b"\xc1",
        b"\x93\x01\x02",
        b"not msgpack at all",
        b"\x81\xa1x" + b"\x91" * 5000,
        b"\xdf\xff\xff\xff\xff",
    ]

    async def scenario(here: Site) -> None:
        for name, call in CALLS.items():
            good = encode(EXAMPLES[call.request.__name__])
            for body in [*bodies, good[:-1], good + b"\x00"]:
                status, error = await here.refused(name, body, here.token(call))
                assert status == 400 and error.kind in ("BadRequest", "InvalidRecord"), (name, body)
        assert here.dataflow.seen == []

    run(scenario)


def test_every_field_of_a_wrong_type_is_400() -> None:
    async def scenario(here: Site) -> None:
        for name, call in CALLS.items():
            wire = msgspec.msgpack.decode(encode(EXAMPLES[call.request.__name__]))
            for field in wire:
                body = msgspec.msgpack.encode({**wire, field: b"\x00"})
                status, error = await here.refused(name, body, here.token(call))
                assert status == 400 and field in error.message, (name, field, error)
        assert here.dataflow.seen == []

    run(scenario)


def test_f96_no_token_and_a_wrong_token_are_401() -> None:
    async def scenario(here: Site) -> None:
        for name, call in CALLS.items():
            body = encode(EXAMPLES[call.request.__name__])
            for token in (None, "x" * 43, here.token(call)[:-1], here.token(call) + "x", "ä"):
                status, error = await here.refused(name, body, token)
                assert (status, error.kind) == (401, "Unauthorised")
        for path in ("/v1/status", "/metrics"):
            async with here.session.get(here.server.url + path) as response:
                assert response.status == 401
        assert here.dataflow.seen == []

    run(scenario)


def test_f96_another_roles_token_is_403() -> None:
    async def scenario(here: Site) -> None:
        refused = 0
        for name, call in CALLS.items():
            for role in set(Role) - call.roles:
                body = encode(EXAMPLES[call.request.__name__])
                status, error = await here.refused(name, body, here.tokens.of(role, "p"))
                assert (status, error.kind) == (403, "Forbidden")
                assert name in error.message and str(role) in error.message
                refused += 1
        assert refused == 22 and here.dataflow.seen == []

    run(scenario)


def test_f96_a_trainer_speaks_for_its_own_policy_only() -> None:
    async def scenario(here: Site) -> None:
        for name in ("resume", "batch", "commit", "fail", "publish", "hello"):
            body = encode(EXAMPLES[CALLS[name].request.__name__])
            status, error = await here.refused(name, body, here.tokens.trainers["q"])
            assert (status, error.kind) == (403, "Forbidden") and "policy q" in error.message
        for name in ("resume", "commit", "publish"):
            foreign = msgspec.structs.replace(EXAMPLES[CALLS[name].request.__name__], policy="q")
            assert (await here.refused(name, encode(foreign), here.tokens.trainers["q"]))[0] == 403
        assert here.dataflow.seen == []
        body = encode(EXAMPLES["ManifestRequest"])
        assert (await here.post("manifest", body, here.tokens.trainers["q"]))[0] == 200

    run(scenario)


def test_f94_wild_names_are_400() -> None:
    async def scenario(here: Site) -> None:
        for wild in ("../../etc/passwd", "", "..", "a\x00", "CON", "x" * 5000):
            request = msgspec.structs.replace(EXAMPLES["RenewRequest"], worker=wild)
            status, error = await here.refused("renew", encode(request), here.tokens.worker)
            assert (status, error.kind) == (400, "BadRequest") and "worker" in error.message
        assert here.dataflow.seen == []

    run(scenario)


def test_unknown_paths_and_methods() -> None:
    async def scenario(here: Site) -> None:
        for path in ("/", "/v1/shutdown", "/v2/lease", "/v1/lease/x", "/v1/..%2f..%2fetc", "/v1/" + "x" * 3000):
            async with here.session.get(here.server.url + path) as response:
                assert response.status == 404
                assert decode(await response.read(), WireError).kind == "NotFound"
        async with here.session.get(here.server.url + "/v1/lease") as response:
            assert response.status == 405
            assert "does not take GET" in decode(await response.read(), WireError).message
        assert here.dataflow.seen == []

    run(scenario)


def test_bodies_over_the_limit_are_413() -> None:
    async def stream(size: int) -> AsyncIterator[bytes]:
        for _ in range(size >> 16):
            yield b"\x00" * (1 << 16)

    async def scenario(here: Site) -> None:
        token = here.tokens.worker
        status, error = await here.refused("renew", b"\x00" * ((1 << 20) + 1), token)
        assert (status, error.kind) == (413, "TooLarge")
        headers = {"Authorization": f"Bearer {token}"}
        async with here.session.post(here.server.url + "/v1/renew", data=stream(2 << 20), headers=headers) as response:
            assert response.status == 413
        assert here.dataflow.seen == []

    run(scenario)


@pytest.mark.parametrize(
    "error", [Fenced("attempt 3 exists"), StorageFull("disk"), Unavailable("starting"), Conflict("c")]
)
def test_errors_of_the_tree_travel_by_kind(error: Any) -> None:
    async def scenario(here: Site) -> None:
        async def fail(request: Any) -> Any:
            raise error

        here.dataflow.instead["submit"] = fail
        status, found = await here.refused("submit", encode(EXAMPLES["SubmitRequest"]), here.tokens.worker)
        assert (status, found.kind, found.message) == (error.status, error.kind, str(error))

    run(scenario)


def test_an_unforeseen_error_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(here: Site) -> None:
        async def fail(request: Any) -> Any:
            raise RuntimeError("secret inside")

        here.dataflow.instead["submit"] = fail
        status, found = await here.refused("submit", encode(EXAMPLES["SubmitRequest"]), here.tokens.worker)
        assert (status, found.kind) == (500, "ServerError") and "secret" not in found.message

    with caplog.at_level(logging.ERROR):
        run(scenario)
    assert "secret inside" in caplog.text


def test_status_as_msgpack_and_as_json() -> None:
    async def scenario(here: Site) -> None:
        headers = {"Authorization": f"Bearer {here.tokens.worker}"}
        async with here.session.get(here.server.url + "/v1/status", headers=headers) as response:
            assert response.headers[RECORD_HEADER] == "StatusReply"
            assert_same(decode(await response.read(), m.StatusReply), EXAMPLES["StatusReply"])
        headers["Accept"] = "application/json"
        async with here.session.get(here.server.url + "/v1/status", headers=headers) as response:
            assert response.content_type == "application/json"
            assert json.loads(await response.read())["policies"][0]["staleness"] == {"0": 5}

    run(scenario)


def test_f93_json_never_holds_nan() -> None:
    async def scenario(here: Site) -> None:
        async def status(request: Any) -> Any:
            return msgspec.structs.replace(EXAMPLES["StatusReply"], counters={"x": float("nan")})

        here.dataflow.instead["status"] = status
        headers = {"Authorization": f"Bearer {here.tokens.operator}", "Accept": "application/json"}
        async with here.session.get(here.server.url + "/v1/status", headers=headers) as response:
            assert response.status == 400
            assert "counters['x']" in decode(await response.read(), WireError).message

    run(scenario)


def test_metrics_are_text() -> None:
    async def scenario(here: Site) -> None:
        headers = {"Authorization": f"Bearer {here.tokens.operator}"}
        async with here.session.get(here.server.url + "/metrics", headers=headers) as response:
            assert (await response.text(), response.content_type) == ("up 1\n", "text/plain")

    run(scenario, metrics=lambda: "up 1\n")


# ── long polls ──


def test_a_caller_that_leaves_a_long_poll_consumes_nothing() -> None:
    async def scenario(here: Site) -> None:
        ended = asyncio.Event()

        async def lease(request: Any) -> Any:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        here.dataflow.instead["lease"] = lease
        call = asyncio.create_task(here.post("lease", encode(EXAMPLES["LeaseRequest"]), here.tokens.worker))
        await here.dataflow.began.wait()
        call.cancel()
        async with asyncio.timeout(5):
            await ended.wait()
        assert [type(r).__name__ for r in here.dataflow.seen] == ["LeaseRequest"]

    run(scenario)


def test_leases_of_a_caller_that_left_are_handed_back() -> None:
    async def scenario(here: Site) -> None:
        returned = asyncio.Event()

        async def lease(request: Any) -> Any:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return EXAMPLES["LeaseReply"]  # the transaction was already on disk

        async def hand_back(request: Any) -> Any:
            returned.set()
            return m.Done()

        here.dataflow.instead |= {"lease": lease, "hand_back": hand_back}
        call = asyncio.create_task(here.post("lease", encode(EXAMPLES["LeaseRequest"]), here.tokens.worker))
        await here.dataflow.began.wait()
        call.cancel()
        async with asyncio.timeout(5):
            await returned.wait()
        assert here.dataflow.seen[-1] == m.HandBackRequest(worker="w1", held=("12/3/2",))

    run(scenario)


def test_a_caller_that_leaves_does_not_end_a_transaction() -> None:
    async def scenario(here: Site) -> None:
        go, done = asyncio.Event(), asyncio.Event()

        async def submit(request: Any) -> Any:
            await go.wait()
            done.set()
            return m.SubmitReply()

        here.dataflow.instead["submit"] = submit
        call = asyncio.create_task(here.post("submit", encode(EXAMPLES["SubmitRequest"]), here.tokens.worker))
        await here.dataflow.began.wait()
        call.cancel()
        await asyncio.wait([call])
        go.set()
        async with asyncio.timeout(5):
            await done.wait()

    run(scenario)


def test_wait_is_bounded() -> None:
    async def scenario(here: Site) -> None:
        for asked, given in ((1e9, 60.0), (-5.0, 0.0), (3.0, 3.0)):
            request = msgspec.structs.replace(EXAMPLES["BatchRequest"], wait_s=asked)
            assert (await here.post("batch", encode(request), here.tokens.trainers["p"]))[0] == 200
            assert here.dataflow.seen[-1].wait_s == given

    run(scenario)


def test_close_ends_long_polls_as_unavailable() -> None:
    async def scenario(here: Site) -> None:
        async def batch(request: Any) -> Any:
            await asyncio.Event().wait()

        here.dataflow.instead["batch"] = batch
        token = here.tokens.trainers["p"]
        call = asyncio.create_task(here.refused("batch", encode(EXAMPLES["BatchRequest"]), token))
        await here.dataflow.began.wait()
        async with asyncio.timeout(4):
            await here.server.close()
            status, error = await call
        assert (status, error.kind) == (503, "Unavailable")

    run(scenario)


def test_close_lets_a_running_call_finish() -> None:
    async def scenario(here: Site) -> None:
        go = asyncio.Event()

        async def commit(request: Any) -> Any:
            await go.wait()
            return m.CommitReply(version=8)

        here.dataflow.instead["commit"] = commit
        call = asyncio.create_task(here.post("commit", encode(EXAMPLES["CommitRequest"]), here.tokens.trainers["p"]))
        await here.dataflow.began.wait()
        closing = asyncio.create_task(here.server.close())
        await asyncio.sleep(0)
        go.set()
        assert (await call)[0] == 200
        await closing

    run(scenario)


# ── binding ──


def test_port_in_use_is_one_sentence() -> None:
    async def main() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            server = Server(ScriptedDataflow(), None, port=port, tokens=None)
            with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
                await server.start()
            await server.close()

    asyncio.run(main())


def test_an_address_that_is_not_here_is_one_sentence() -> None:
    async def main() -> None:
        server = Server(ScriptedDataflow(), None, host="203.0.113.1", tokens=Tokens.make(["p"]))
        with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1"):
            await server.start()

    asyncio.run(main())


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "10.0.0.1", "example.org"])
def test_binding_beyond_loopback_needs_tokens_and_warns_without_tls(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataflow = EXAMPLES  # never called
    with pytest.raises(ConfigError, match="without tokens is refused"):
        Server(_Nothing(), None, host=host, tokens=None)
    with caplog.at_level(logging.WARNING):
        Server(_Nothing(), None, host=host, tokens=Tokens.make(["p"]))
    assert "no_tls" in caplog.text and dataflow


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_loopback_needs_neither(host: str, caplog: pytest.LogCaptureFixture) -> None:
    Server(_Nothing(), None, host=host, tokens=None)
    assert not caplog.text


class _Nothing:
    def __getattr__(self, name: str) -> Any:
        return None


def test_a_large_episode_passes() -> None:
    async def scenario(here: Site) -> None:
        episode: Episode = msgspec.structs.replace(EXAMPLES["Episode"], error="x" * (3 << 20))
        request = msgspec.structs.replace(EXAMPLES["SubmitRequest"], episode=episode)
        assert (await here.post("submit", encode(request), here.tokens.worker))[0] == 200

    run(scenario)
