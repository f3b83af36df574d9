"""Several submits in one request: each is judged alone, and whoever waits for one gets its own answer."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from astraflow.errors import Fenced, ServerError, Unavailable
from astraflow.wire import many
from astraflow.wire import messages as m
from astraflow.wire.calls import MANY, MIB, PREFIX, RECORD_HEADER, Role, WireError
from astraflow.wire.client import HttpDataflow
from astraflow.wire.codec import decode, encode
from astraflow.wire.replies import record_response
from astraflow.wire.server import Server
from astraflow.wire.tokens import Tokens
from tests.golden.examples import EXAMPLES
from tests.unit.wire.double import ScriptedDataflow
from tests.unit.wire.equal import assert_same

Submit = Callable[[m.SubmitRequest], Awaitable[m.SubmitReply]]


def request(index: int) -> m.SubmitRequest:
    return msgspec.structs.replace(EXAMPLES["SubmitRequest"], index=index)  # type: ignore[return-value]


class Place:
    """A server whose dataflow answers by ``submit``, and a client; ``envelopes`` counts requests of many."""

    def __init__(self, server: Server, flow: HttpDataflow, dataflow: ScriptedDataflow, tokens: Tokens) -> None:
        self.server, self.flow, self.dataflow, self.tokens = server, flow, dataflow, tokens
        self.envelopes: list[int] = []

    async def post(self, body: bytes, token: str | None) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        url = f"{self.server.url}{PREFIX}/{MANY.name}"
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, data=io.BytesIO(body), headers=headers) as response,
        ):
            return response.status, await response.read()

    def indices(self) -> list[int]:
        return sorted(each.index for each in self.dataflow.seen)


@asynccontextmanager
async def place(submit: Submit | None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    dataflow, tokens = ScriptedDataflow(), Tokens.make(["p"])
    if submit is not None:
        dataflow.instead["submit"] = submit
    server = Server(dataflow, None, tokens=tokens, close_s=1.0)
    await server.start()
    async with asyncio.timeout(30), HttpDataflow(server.url, tokens.worker, retry_s=5.0, attempts=4) as flow:
        here = Place(server, flow, dataflow, tokens)
        answer = many.answer

        async def counted(message: m.SubmitManyRequest, one: Submit) -> m.SubmitManyReply:
            here.envelopes.append(len(message.requests))
            return await answer(message, one)

        monkeypatch.setattr(many, "answer", counted)
        yield here
    await server.close()


async def echo(message: m.SubmitRequest) -> m.SubmitReply:
    """Tells who was answered: the odd ones are duplicates."""
    return m.SubmitReply(duplicate=bool(message.index % 2))


def run(
    monkeypatch: pytest.MonkeyPatch, scenario: Callable[[Place], Awaitable[None]], submit: Submit | None = echo
) -> None:
    async def main() -> None:
        async with place(submit, monkeypatch) as here:
            await scenario(here)

    asyncio.run(main())


def test_what_is_submitted_in_one_turn_travels_together_and_each_has_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(here: Place) -> None:
        replies = await asyncio.gather(*(here.flow.submit(request(n)) for n in range(5)))
        assert [reply.duplicate for reply in replies] == [False, True, False, True, False]
        assert here.envelopes == [5] and here.indices() == [0, 1, 2, 3, 4]
        assert_same(min(here.dataflow.seen, key=lambda each: each.index), request(0))
        await here.flow.submit(request(9))
        assert here.envelopes == [5], "whoever is alone goes by the plain call"

    run(monkeypatch, scenario)


def test_more_than_fits_goes_in_several_and_a_large_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "MOST_BYTES", 2 * len(encode(request(0))) + 10)

    async def scenario(here: Place) -> None:
        large = msgspec.structs.replace(
            request(6), episode=msgspec.structs.replace(request(6).episode, error="x" * many.MOST_BYTES)
        )
        await asyncio.gather(*(here.flow.submit(request(n)) for n in range(5)), here.flow.submit(large))
        assert here.envelopes == [2, 2] and here.indices() == [0, 1, 2, 3, 4, 6]

    run(monkeypatch, scenario)


def test_a_refused_one_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def submit(message: m.SubmitRequest) -> m.SubmitReply:
        if message.index == 1:
            raise Fenced("attempt 3 exists")
        if message.index == 2:
            raise ZeroDivisionError("a bug")
        return m.SubmitReply()

    async def scenario(here: Place) -> None:
        found = await asyncio.gather(*(here.flow.submit(request(n)) for n in range(4)), return_exceptions=True)
        assert found[0] == found[3] == m.SubmitReply()
        assert type(found[1]) is Fenced and str(found[1]) == "attempt 3 exists"
        assert type(found[2]) is ServerError and "bug" not in str(found[2])

    run(monkeypatch, scenario, submit)


def test_a_broken_one_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(here: Place) -> None:
        good = encode(request(0))
        bad = [b"", b"\xc1", good[:-1], good + b"\x00", encode(msgspec.structs.replace(request(1), worker="../x"))]
        status, body = await here.post(encode(m.SubmitManyRequest(requests=(*bad, good))), here.tokens.worker)
        answers = decode(body, m.SubmitManyReply).answers
        assert status == 200 and answers[-1].reply == m.SubmitReply() and here.indices() == [0]
        assert all(answer.reply is None for answer in answers[:-1])
        assert {answer.kind for answer in answers[:-1]} <= {"BadRequest", "InvalidRecord"}

    run(monkeypatch, scenario)


def test_only_a_worker_may_send_it_and_only_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(here: Place) -> None:
        body = encode(m.SubmitManyRequest(requests=(encode(request(0)),)))
        tokens = {None: 401, "x" * 43: 401, here.tokens.of(Role.TRAINER, "p"): 403, here.tokens.operator: 403}
        for token, wanted in tokens.items():
            assert (await here.post(body, token))[0] == wanted
        huge = encode(m.SubmitManyRequest(requests=(bytes(MIB),)))
        for broken, wanted in ((b"\xc1", 400), (b"\x80", 400), (encode(request(0)), 400), (huge, 413)):
            assert (await here.post(broken, here.tokens.worker))[0] == wanted
        assert here.dataflow.seen == []

    run(monkeypatch, scenario)


def test_one_that_was_not_reached_is_tried_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[int] = []

    async def submit(message: m.SubmitRequest) -> m.SubmitReply:
        if message.index == 1 and not refused:
            refused.append(1)
            raise Unavailable("dataflow is closing")
        return m.SubmitReply()

    async def scenario(here: Place) -> None:
        assert await asyncio.gather(*(here.flow.submit(request(n)) for n in range(3))) == [m.SubmitReply()] * 3
        assert here.indices() == [0, 1, 1, 2] and here.envelopes == [3]

    run(monkeypatch, scenario, submit)


def test_a_caller_that_leaves_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    go = asyncio.Event()

    async def submit(message: m.SubmitRequest) -> m.SubmitReply:
        await go.wait()
        return m.SubmitReply()

    async def scenario(here: Place) -> None:
        calls = [asyncio.create_task(here.flow.submit(request(n))) for n in range(3)]
        await here.dataflow.began.wait()
        calls[1].cancel()
        await asyncio.wait([calls[1]])
        go.set()
        assert [await calls[0], await calls[2]] == [m.SubmitReply()] * 2 and calls[1].cancelled()

    run(monkeypatch, scenario, submit)


def test_closing_the_client_ends_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def submit(message: m.SubmitRequest) -> m.SubmitReply:
        await asyncio.Event().wait()
        return m.SubmitReply()

    async def scenario(here: Place) -> None:
        calls = [asyncio.create_task(here.flow.submit(request(n))) for n in range(3)]
        await here.dataflow.began.wait()
        await here.flow.close()
        await asyncio.wait(calls)
        assert all(call.cancelled() for call in calls)

    run(monkeypatch, scenario, submit)


def test_an_older_dataflow_gets_them_one_by_one() -> None:
    paths: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        paths.append(request.path)
        if request.path.endswith(MANY.name):
            return record_response(WireError(kind="NotFound", message="there is no such call"), status=404)
        return web.Response(body=encode(m.SubmitReply()), headers={RECORD_HEADER: "SubmitReply"})

    async def main() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with asyncio.timeout(30), HttpDataflow(url, None) as flow:
            await asyncio.gather(*(flow.submit(request(n)) for n in range(3)))
        await runner.cleanup()

    asyncio.run(main())
    assert sorted(paths) == [f"{PREFIX}/submit"] * 3 + [f"{PREFIX}/submit_many"]


def test_an_answer_to_other_requests_is_an_error_and_no_hang() -> None:
    async def many_of_one(_: m.SubmitManyRequest) -> m.SubmitManyReply:
        return m.SubmitManyReply(answers=(m.SubmitAnswer(reply=m.SubmitReply()),))

    async def one(_: bytes) -> m.SubmitReply:
        return m.SubmitReply()

    async def main() -> list[Any]:
        submits = many.Submits(one, many_of_one)
        async with asyncio.timeout(5):
            return await asyncio.gather(*(submits.submit(request(n)) for n in range(2)), return_exceptions=True)

    found = asyncio.run(main())
    assert [type(each).__name__ for each in found] == ["ProtocolError", "ProtocolError"]
