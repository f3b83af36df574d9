"""The way between a component and dataflow: open, cut, slow, open again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from astraflow.run.chaos.proxy import SLOW_DELAY_S, Proxy


@asynccontextmanager
async def way() -> AsyncIterator[tuple[Proxy, int]]:
    """A proxy before a server that sends back what it gets."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(100):
                writer.write(data)
        finally:
            writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = Proxy()
    port = await proxy.open()
    proxy.lead_to("127.0.0.1", server.sockets[0].getsockname()[1])
    try:
        yield proxy, port
    finally:
        await proxy.close()
        server.close()


async def say(port: int, word: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(10):
            writer.write(word)
            return await reader.read(100)
    finally:
        writer.transport.abort()


def test_open_cut_and_open_again() -> None:
    async def play() -> None:
        async with way() as (proxy, port):
            assert await say(port, b"one") == b"one"
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"held")
            assert await reader.read(100) == b"held"
            proxy.cut = True
            with pytest.raises(ConnectionResetError):  # what is open is reset, it does not end politely
                async with asyncio.timeout(10):
                    await reader.readexactly(1)
            writer.transport.abort()
            with pytest.raises(ConnectionResetError):
                await say(port, b"two")
            proxy.cut = False
            assert await say(port, b"three") == b"three"

    asyncio.run(play())


def test_slow_takes_its_time_both_ways() -> None:
    async def play() -> float:
        async with way() as (proxy, port):
            proxy.slow = True
            began = asyncio.get_running_loop().time()
            assert await say(port, b"x") == b"x"
            return asyncio.get_running_loop().time() - began

    assert asyncio.run(play()) >= 2 * SLOW_DELAY_S


def test_a_dataflow_that_is_not_there_ends_the_connection() -> None:
    async def play() -> bytes:
        proxy = Proxy()
        port = await proxy.open()
        try:
            return await say(port, b"x")
        finally:
            await proxy.close()

    with pytest.raises(ConnectionResetError):
        asyncio.run(play())
