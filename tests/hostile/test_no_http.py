"""Bytes that are no HTTP, from whoever finds the port: one line in the log, a refusal that holds nothing of them."""

from __future__ import annotations

import asyncio
import logging

import pytest
from aiohttp import web

from astraflow.wire.calls import WireError
from astraflow.wire.codec import decode
from astraflow.wire.listener import Listener
from astraflow.wire.replies import errors_as_records

MARK = b"SECRET-of-the-caller"
NO_HTTP = {
    "noise": b"\x00\xff" + MARK + b"\r\n\r\n",
    "hello of TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + MARK * 8 + b"\r\n\r\n",
    "another protocol": b"EHLO " + MARK + b"\r\n\r\n",
    "method": MARK + b"(/) / HTTP/1.1\r\nHost: x\r\n\r\n",
    "version": b"GET /v1/status HTTP/" + MARK + b"\r\n\r\n",
    "header": b"GET /v1/status HTTP/1.1\r\n" + MARK + b"\r\n\r\n",
    "name of a header": b"GET /v1/status HTTP/1.1\r\nHost: x\r\n(" + MARK + b"): 1\r\n\r\n",
    "length": b"POST /v1/lease HTTP/1.1\r\nHost: x\r\nContent-Length: " + MARK + b"\r\n\r\n",
    "two lengths": b"POST /v1/lease HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n" + MARK,
    "line without end": b"GET /" + MARK * 1000 + b" HTTP/1.1\r\n\r\n",
    "second request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"\x00" + MARK + b"\r\n\r\n",
}


async def tell(data: bytes) -> bytes:
    """Everything that is answered until the port hangs up."""
    listener = Listener(web.Application(middlewares=[errors_as_records]), host="127.0.0.1", port=0, close_s=1.0)
    await listener.start()
    try:
        async with asyncio.timeout(60.0):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(listener.url.rpartition(":")[2]))
            writer.write(data)
            answer = await reader.read()
            writer.close()
            return answer
    finally:
        await listener.close()


@pytest.mark.parametrize("what", NO_HTTP)
def test_it_is_refused_in_one_line_and_nothing_of_it_comes_back(what: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "astraflow"):
        answer = asyncio.run(tell(NO_HTTP[what]))
    head, _, body = answer[answer.rindex(b"HTTP/1.0 ") :].partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 400 ")
    assert decode(body, WireError).message.startswith("this is no HTTP/1.1 request")
    assert MARK not in answer and MARK[:6] not in answer
    said = [each for each in caplog.records if each.levelno > logging.DEBUG]
    assert [each.name for each in said] == ["astraflow.wire"], [each.getMessage() for each in said]
    assert said[0].exc_info is None and said[0].getMessage().startswith("no_http remote=127.0.0.1 error=")
    assert "\n" not in caplog.text.strip() and MARK.decode() not in caplog.text


def test_a_bug_of_ours_still_leaves_its_traceback_and_tells_the_caller_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def breaks(request: web.Request) -> web.StreamResponse:
        raise ZeroDivisionError("ours")

    async def ask() -> bytes:
        app = web.Application()
        app.router.add_get("/", breaks)
        listener = Listener(app, host="127.0.0.1", port=0, close_s=1.0)
        await listener.start()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(listener.url.rpartition(":")[2]))
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = await reader.read()
            writer.close()
            return answer
        finally:
            await listener.close()

    answer = asyncio.run(ask())
    assert answer.startswith(b"HTTP/1.1 500 ") and b"ours" not in answer
    assert "ZeroDivisionError: ours" in caplog.text
