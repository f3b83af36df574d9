"""Weights over HTTP with a limit on bytes a second, at either end: same kit, same ranges, and it is kept."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from astraflow.testing.check_store import check_store, content, write
from astraflow.weights.store import DirStore, HttpStore
from astraflow.wire import serve_blobs
from astraflow.wire.calls import Role
from astraflow.wire.client import HttpDataflow
from astraflow.wire.rate import ByteRate
from astraflow.wire.server import Server
from astraflow.wire.tokens import Tokens
from tests.conformance.test_stores import run, served, stored
from tests.unit.wire.double import ScriptedDataflow

FAST = 200e6


def test_a_limited_server_conforms(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    async def scenario() -> None:
        async with served(tmp_path / "s", rate=ByteRate(FAST)) as (trainer, worker, _, _):
            await check_store(trainer, worker, scratch)

    run(scenario)
    assert not [name for name in stored(tmp_path / "s") if name.startswith(".")]


def test_a_limited_client_conforms(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    async def scenario() -> None:
        tokens = Tokens.make(["p"])
        server = Server(ScriptedDataflow(), DirStore(tmp_path / "s"), tokens=tokens)
        await server.start()
        async with HttpDataflow(server.url, tokens.of(Role.TRAINER, "p"), rate=ByteRate(FAST)) as client:
            store = HttpStore(client.weights)
            await check_store(store, store, scratch)
        await server.close()

    run(scenario)


def test_ranges_of_a_limited_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            served(tmp_path / "s", rate=ByteRate(FAST)) as (trainer, _, server, tokens),
            aiohttp.ClientSession() as session,
        ):
            data = content(10_000)
            file = await trainer.put(write(tmp_path, "a.safetensors", data))
            url = f"{server.url}/v1/weights/{file.sha256}"
            headers = {"Authorization": f"Bearer {tokens.worker}"}
            for asked, status, body in (
                ("bytes=0-9", 206, data[:10]),
                ("bytes=9990-", 206, data[9990:]),
                ("bytes=-5", 206, data[-5:]),
                ("bytes=9990-99999", 206, data[9990:]),
                ("bytes=20000-", 416, b""),
            ):
                async with session.get(url, headers={**headers, "Range": asked}) as response:
                    assert (response.status, await response.read()) == (status, body), asked
                    if status == 206:
                        assert response.headers["Content-Range"].endswith("/10000")
            async with session.get(url, headers={**headers, "Range": "bytes=x-y"}) as response:
                assert response.status == 400
            async with session.head(url, headers=headers) as response:
                assert (response.status, response.content_length) == (200, 10_000)

    run(scenario)


def test_all_readers_together_stay_within_the_limit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "s", rate=ByteRate(2e6)) as (trainer, worker, _, _):
            files = [await trainer.put(write(tmp_path, f"{n}.safetensors", content(400_000, seed=n))) for n in range(3)]
            began = asyncio.get_running_loop().time()
            await asyncio.gather(*(worker.get(file, tmp_path / f"b{n}") for n, file in enumerate(files)))
            assert asyncio.get_running_loop().time() - began >= 1.2e6 / 2e6 - 0.15
            assert all((tmp_path / f"b{n}").read_bytes() == content(400_000, seed=n) for n in range(3))

    run(scenario)


@pytest.mark.parametrize("end", ["server", "client"])
def test_a_very_slow_line_is_no_silence(tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are small: even where a second's worth is little, bytes arrive before a transfer counts as dead."""
    monkeypatch.setattr("astraflow.wire.transfer.IDLE_S", 1.0)

    async def scenario() -> None:
        slow = ByteRate(20_000)
        async with served(tmp_path / "s", rate=slow if end == "server" else None) as (trainer, _, server, tokens):
            file = await trainer.put(write(tmp_path, "a.safetensors", content(50_000)))
            rate = slow if end == "client" else None
            async with HttpDataflow(server.url, tokens.worker, retry_s=1.0, attempts=1, rate=rate) as client:
                began = asyncio.get_running_loop().time()
                await HttpStore(client.weights).get(file, tmp_path / "b")
                assert asyncio.get_running_loop().time() - began >= 2.0
            assert (tmp_path / "b").read_bytes() == content(50_000)

    run(scenario)


def test_who_takes_nothing_makes_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_blobs, "READERS", 1)
    monkeypatch.setattr(serve_blobs, "IDLE_S", 0.3)

    async def scenario() -> None:
        async with served(tmp_path / "s", rate=ByteRate(FAST)) as (trainer, worker, server, tokens):
            data = content(32 << 20)
            file = await trainer.put(write(tmp_path, "a.safetensors", data))
            host, port = server.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 10)
            head = f"GET /v1/weights/{file.sha256} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {tokens.worker}\r\n\r\n"
            writer.write(head.encode())
            assert b"200" in await reader.readline()
            async with asyncio.timeout(20):
                await worker.get(file, tmp_path / "b")
            assert (tmp_path / "b").read_bytes() == data
            writer.close()

    run(scenario)
