"""HttpDataflow: one budget of retries, final errors by class, success only for the record that was asked for."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from astraflow.errors import (
    AstraFlowError,
    ConfigError,
    Fenced,
    ProtocolError,
    ServerError,
    StorageFull,
    Unavailable,
    UnknownVersion,
)
from astraflow.wire import messages as m
from astraflow.wire import transport
from astraflow.wire.calls import CALLS, RECORD_HEADER
from astraflow.wire.client import HttpDataflow
from astraflow.wire.codec import encode
from astraflow.wire.server import Server
from astraflow.wire.tokens import Tokens
from astraflow.wire.transport import Retry
from tests.golden.examples import EXAMPLES, MANIFEST
from tests.unit.wire.double import ScriptedDataflow
from tests.unit.wire.equal import assert_same

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
FAST = {"retry_s": 20.0, "timeout_s": 10.0}


@asynccontextmanager
async def stranger(answer: Answer) -> AsyncIterator[str]:
    """An HTTP server that is not ours."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def submit_to(answer: Answer, **settings: Any) -> Any:
    async def main() -> Any:
        async with (
            asyncio.timeout(30),
            stranger(answer) as url,
            HttpDataflow(url, None, **{**FAST, **settings}) as flow,
        ):
            return await flow.submit(EXAMPLES["SubmitRequest"])  # type: ignore[arg-type]

    return asyncio.run(main())


def test_every_call_of_the_protocol() -> None:
    async def main() -> None:
        tokens = Tokens.make(["p"])
        dataflow = ScriptedDataflow()
        server = Server(dataflow, None, tokens=tokens)
        await server.start()
        for name, call in CALLS.items():
            token = tokens.of(sorted(call.roles)[0], "p")
            async with HttpDataflow(server.url, token, **FAST) as flow:
                request = EXAMPLES[call.request.__name__]
                assert_same(await getattr(flow, name)(request), EXAMPLES[call.reply.__name__])
                assert_same(dataflow.seen[-1], request)
        async with HttpDataflow(server.url + "/", tokens.worker, **FAST) as flow:
            assert_same(await flow.status(), EXAMPLES["StatusReply"])
            with pytest.raises(AstraFlowError, match="may not call events"):
                await flow.events(m.EventsRequest())
        await server.close()

    asyncio.run(main())


@pytest.mark.parametrize("error", [Fenced("attempt 3 exists"), StorageFull("disk"), UnknownVersion("v9")])
def test_refusals_arrive_as_their_class_after_one_call(error: Any) -> None:
    async def main() -> None:
        dataflow = ScriptedDataflow()

        async def refuse(request: Any) -> Any:
            raise error

        dataflow.instead["submit"] = refuse
        server = Server(dataflow, None, tokens=None)
        await server.start()
        async with HttpDataflow(server.url, None, **FAST) as flow:
            with pytest.raises(type(error), match=f"^{error}$") as caught:
                await flow.submit(EXAMPLES["SubmitRequest"])  # type: ignore[arg-type]
            assert type(caught.value) is type(error) and len(dataflow.seen) == 1
        await server.close()

    asyncio.run(main())


# ── F87: one budget ──


def counting(statuses: list[int]) -> tuple[Answer, list[int]]:
    calls: list[int] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        calls.append(statuses[min(len(calls), len(statuses) - 1)])
        if calls[-1] == 200:
            return web.Response(body=encode(m.SubmitReply()), headers={RECORD_HEADER: "SubmitReply"})
        return web.Response(status=calls[-1], text="no")

    return answer, calls


def test_f87_always_unavailable_costs_the_budget_of_calls() -> None:
    answer, calls = counting([503])
    with pytest.raises(Unavailable, match="did not answer in 4 attempts"):
        submit_to(answer, attempts=4)
    assert len(calls) == 4


def test_f87_the_deadline_is_passed_down() -> None:
    async def hang(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async def main() -> float:
        async with stranger(hang) as url, HttpDataflow(url, None, retry_s=0.5, timeout_s=30.0) as flow:
            began = asyncio.get_running_loop().time()
            with pytest.raises(Unavailable, match="TimeoutError"):
                await flow.submit(EXAMPLES["SubmitRequest"])  # type: ignore[arg-type]
            return asyncio.get_running_loop().time() - began

    assert asyncio.run(main()) < 5.0


@pytest.mark.parametrize("status", [400, 404, 409, 500, 302])
def test_f87_what_cannot_heal_costs_one_call(status: int) -> None:
    answer, calls = counting([status])
    with pytest.raises((ProtocolError, ServerError)):
        submit_to(answer)
    assert calls == [status]


def test_f87_down_twice_then_fine_is_three_calls() -> None:
    answer, calls = counting([503, 502, 200])
    assert submit_to(answer) == m.SubmitReply()
    assert len(calls) == 3


def test_f87_pauses_grow_and_are_seeded() -> None:
    retry = Retry(first_s=0.1, most_s=5.0)
    pauses = [retry.pause_s(n, random.Random(3)) for n in range(1, 100)]
    assert pauses == [retry.pause_s(n, random.Random(3)) for n in range(1, 100)]
    assert 0.05 <= pauses[0] <= 0.1 and pauses[0] < pauses[3] < pauses[5] and max(pauses) <= 5.0
    with pytest.raises(ConfigError):
        Retry(attempts=0)


def test_nobody_listens() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"

        async def main() -> None:
            async with HttpDataflow(url, "token-that-must-not-show", retry_s=5.0, attempts=2) as flow:
                with pytest.raises(Unavailable, match="in 2 attempts") as caught:
                    await flow.status()
                assert "token-that" not in str(caught.value) + repr(caught.value.__cause__)

        asyncio.run(main())


def test_nobody_waits_in_silence(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Each SAY_S of a call that is tried again: for whom, for how long, for how long at most, and why."""
    monkeypatch.setattr(transport, "SAY_S", 0.05)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"

        async def main() -> None:
            async with HttpDataflow(url, "token-that-must-not-show", retry_s=1.0) as flow:
                with pytest.raises(Unavailable):
                    await flow.status()

        asyncio.run(main())
    said = [record.getMessage() for record in caplog.records if record.name == "astraflow.wire"]
    assert said and all(line.startswith(f"waits_for_dataflow url={url}/v1/status for_s=") for line in said)
    assert "gives_up_in_s=1: " in said[0] and "Connect" in said[0] and "token-that" not in "".join(said)


def test_a_restarted_dataflow_is_found_again() -> None:
    async def main() -> None:
        server = Server(ScriptedDataflow(), None, tokens=None)
        await server.start()
        port = int(server.url.rsplit(":", 1)[1])
        async with HttpDataflow(server.url, None, **FAST) as flow:
            await flow.status()
            await server.close()
            call = asyncio.create_task(flow.status())
            await asyncio.sleep(0.05)
            server = Server(ScriptedDataflow(), None, port=port, tokens=None)
            await server.start()
            async with asyncio.timeout(10):
                assert_same(await call, EXAMPLES["StatusReply"])
        await server.close()

    asyncio.run(main())


# ── F92: success needs a schema-valid body ──


def fixed(body: bytes, *, status: int = 200, record: str | None = None) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        headers = {RECORD_HEADER: record} if record else {}
        return web.Response(status=status, body=body, headers=headers)

    return answer


INNER = msgspec.msgpack.encode({"ok": True, "result": {"ok": False, "error": "x"}})


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (fixed(INNER), ProtocolError),
        (fixed(b'{"ok":true,"result":{"ok":false,"error":"x"}}'), ProtocolError),
        (fixed(encode(m.Done()), record="Done"), ProtocolError),
        (fixed(b"Internal Server Error", status=500), ServerError),
        (fixed(encode(m.SubmitReply())[:-1], record="SubmitReply"), ProtocolError),
        (fixed(b"", record="SubmitReply"), ProtocolError),
        (fixed(b"", status=204, record="SubmitReply"), ProtocolError),
        (fixed(b"", status=204), ProtocolError),
        (fixed(b"\x81", status=409, record="WireError"), ProtocolError),
        (fixed(b"<html>", status=404), ProtocolError),
        (
            fixed(msgspec.msgpack.encode({"kind": "Unheard", "message": "x"}), status=409, record="WireError"),
            AstraFlowError,
        ),
        (
            fixed(msgspec.msgpack.encode({"kind": "SystemExit", "message": "x"}), status=500, record="WireError"),
            AstraFlowError,
        ),
    ],
)
def test_f92_nested_failure_is_never_success(answer: Answer, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        submit_to(answer)
    assert isinstance(caught.value, AstraFlowError) and "\n" not in str(caught.value)


def test_replies_are_limited() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={RECORD_HEADER: "SubmitReply"})
        await response.prepare(request)
        try:
            for _ in range(80):
                await response.write(b"\x00" * (1 << 20))
        except ConnectionError:
            return response
        return response

    with pytest.raises(ProtocolError, match="more than"):
        submit_to(answer)


def test_a_connection_cut_in_the_middle_is_tried_again() -> None:
    calls = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        body = encode(m.SubmitReply())
        response = web.StreamResponse(headers={RECORD_HEADER: "SubmitReply", "Content-Length": str(len(body))})
        await response.prepare(request)
        if calls == 1:
            await response.write(body[:3])
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(body)
        return response

    assert submit_to(answer) == m.SubmitReply()
    assert calls == 2


def test_redirects_do_not_carry_the_token() -> None:
    seen: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(request.path)
        raise web.HTTPFound("/elsewhere")

    with pytest.raises(ProtocolError):
        submit_to(answer)
    assert seen == ["/v1/submit"]


def test_f94_manifests_that_name_other_paths_are_refused() -> None:
    async def main() -> None:
        dataflow = ScriptedDataflow()
        wild = msgspec.structs.replace(MANIFEST.files[0], name="../../x")

        async def answer(request: Any) -> Any:
            return m.RenewReply(manifests={"p": msgspec.structs.replace(MANIFEST, files=(wild,))})

        async def other(request: Any) -> Any:
            return m.LeaseReply(manifests={"q": MANIFEST})

        dataflow.instead |= {"renew": answer, "lease": other}
        server = Server(dataflow, None, tokens=None)
        await server.start()
        async with HttpDataflow(server.url, None, **FAST) as flow:
            with pytest.raises(AstraFlowError, match=r"WeightFile\.name"):
                await flow.renew(EXAMPLES["RenewRequest"])  # type: ignore[arg-type]
            with pytest.raises(AstraFlowError, match="announced a manifest of p as one of q"):
                await flow.lease(EXAMPLES["LeaseRequest"])  # type: ignore[arg-type]
        await server.close()

    asyncio.run(main())


@pytest.mark.parametrize("url", ["localhost:80", "ftp://x", ""])
def test_wrong_urls(url: str) -> None:
    with pytest.raises(ConfigError, match="http"):
        HttpDataflow(url, None)


def test_a_request_that_cannot_travel_is_refused_before_it_is_sent() -> None:
    answer, calls = counting([200])

    async def main() -> None:
        async with stranger(answer) as url, HttpDataflow(url, None) as flow:
            request = msgspec.structs.replace(EXAMPLES["CommitRequest"], metrics={"loss": float("nan")})
            with pytest.raises(AstraFlowError, match="metrics"):
                await flow.commit(request)  # type: ignore[arg-type]

    asyncio.run(main())
    assert calls == []
