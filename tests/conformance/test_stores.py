"""Every weight store passes the same kit; what each must do beyond it follows."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from astraflow.errors import AstraFlowError, BadRequest, DigestMismatch, Forbidden, NotFound, StorageFull
from astraflow.testing.check_store import check_store, content, write
from astraflow.testing.memory_store import MemoryStore
from astraflow.testing.virtual_clock import ManualClock
from astraflow.types import WeightFile
from astraflow.weights import store as store_module
from astraflow.weights.store import DirStore, HttpStore
from astraflow.wire.calls import Role
from astraflow.wire.client import HttpDataflow
from astraflow.wire.server import Server
from astraflow.wire.tokens import Tokens
from tests.unit.wire.double import ScriptedDataflow


@asynccontextmanager
async def served(folder: Path, **settings: Any) -> AsyncIterator[tuple[HttpStore, HttpStore, Server, Tokens]]:
    """A trainer's and a worker's view of a folder behind a server."""
    tokens = Tokens.make(["p"])
    server = Server(ScriptedDataflow(), DirStore(folder), tokens=tokens, **settings)
    await server.start()
    async with (
        HttpDataflow(server.url, tokens.of(Role.TRAINER, "p"), retry_s=10.0, attempts=5) as trainer,
        HttpDataflow(server.url, tokens.worker, retry_s=10.0, attempts=5) as worker,
    ):
        yield HttpStore(trainer.weights), HttpStore(worker.weights), server, tokens
    await server.close()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(main())


def stored(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_memory_store_conforms_where_it_promises_to(tmp_path: Path) -> None:
    """The simulator's store: what it leaves out (checks of names) cannot happen there."""

    async def scenario() -> None:
        store = MemoryStore()
        file = await store.put(write(tmp_path, "a.safetensors", content(5000)))
        await store.get(file, tmp_path / "b")
        assert (tmp_path / "b").read_bytes() == content(5000) and await store.has(file.sha256)

    run(scenario)


def test_dir_store_conforms(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    run(lambda: check_store(DirStore(tmp_path / "s"), DirStore(tmp_path / "s"), scratch))
    assert not [name for name in stored(tmp_path / "s") if name.startswith(".")]


def test_http_store_conforms(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    async def scenario() -> None:
        async with served(tmp_path / "s") as (trainer, worker, _, _):
            await check_store(trainer, worker, scratch)

    run(scenario)
    assert not [name for name in stored(tmp_path / "s") if name.startswith(".")]


# ── the folder ──


def test_a_torn_write_is_invisible(tmp_path: Path) -> None:
    store = DirStore(tmp_path / "s")
    data = content(10_000)
    incoming = store.incoming(hashlib.sha256(data).hexdigest())
    incoming.write(data[:5_000])
    assert store.path(hashlib.sha256(data).hexdigest()) is None
    incoming.write(data[5_000:])
    assert store.path(hashlib.sha256(data).hexdigest()) is None
    incoming.commit()
    path = store.path(hashlib.sha256(data).hexdigest())
    assert path is not None and path.read_bytes() == data
    incoming.abort()
    assert path.exists() and stored(tmp_path / "s") == [path.name]


def test_what_arrives_wrong_is_gone(tmp_path: Path) -> None:
    store = DirStore(tmp_path / "s")
    incoming = store.incoming("0" * 64)
    incoming.write(b"x")
    with pytest.raises(DigestMismatch):
        incoming.commit()
    assert stored(tmp_path / "s") == []


def test_same_disk_needs_no_copy(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = DirStore(tmp_path / "s")
        source = write(tmp_path, "a.safetensors", content(5000))
        file = await store.put(source, may_link=True)
        await store.get(file, tmp_path / "b.safetensors")
        path = store.path(file.sha256)
        assert path is not None and path.stat().st_ino == source.stat().st_ino
        assert (tmp_path / "b.safetensors").stat().st_ino == path.stat().st_ino
        copied = write(tmp_path, "c.safetensors", content(5000, seed=1))
        kept = store.path((await store.put(copied)).sha256)
        assert kept is not None and kept.stat().st_ino != copied.stat().st_ino

    run(scenario)


def test_without_links_it_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EXDEV, "another disk")

    monkeypatch.setattr(store_module.os, "link", refuse)

    async def scenario() -> None:
        store = DirStore(tmp_path / "s")
        file = await store.put(write(tmp_path, "a.safetensors", content(5000)), may_link=True)
        await store.get(file, tmp_path / "b.safetensors")
        assert (tmp_path / "b.safetensors").read_bytes() == content(5000)
        with pytest.raises(NotFound):
            await store.get(WeightFile(name="x", sha256="0" * 64, size_bytes=1), tmp_path / "c")

    run(scenario)


def test_rot_is_found_and_the_next_put_heals_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = DirStore(tmp_path / "s")
        source = write(tmp_path, "a.safetensors", content(5000))
        file = await store.put(source)
        path = store.path(file.sha256)
        assert path is not None
        path.chmod(0o644)
        path.write_bytes(content(5000, seed=1))
        with pytest.raises(DigestMismatch, match=r"a\.safetensors"):
            await store.get(file, tmp_path / "b")
        assert not (tmp_path / "b").exists()
        await store.put(source)
        await store.get(file, tmp_path / "b")
        assert (tmp_path / "b").read_bytes() == content(5000)

    run(scenario)


def test_who_asks_for_a_wrong_size_takes_nothing_from_others(tmp_path: Path) -> None:
    """A relay is told a size by whoever asks it."""

    async def scenario() -> None:
        store = DirStore(tmp_path / "s")
        file = await store.put(write(tmp_path, "a.safetensors", content(5000)))
        with pytest.raises(DigestMismatch, match="expected 17 bytes"):
            await store.get(msgspec.structs.replace(file, size_bytes=17), tmp_path / "b")
        await store.get(file, tmp_path / "b")
        assert (tmp_path / "b").read_bytes() == content(5000)

    run(scenario)


def test_a_full_disk_is_storage_full_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(store_module.os, "fsync", full)

    async def scenario() -> None:
        store = DirStore(tmp_path / "s")
        with pytest.raises(StorageFull):
            await store.put(write(tmp_path, "a.safetensors", content(5000)))
        assert stored(tmp_path / "s") == []

    run(scenario)


def test_collect_keeps_what_is_named_and_what_is_young(tmp_path: Path) -> None:
    """Young by the store's own clock: dates may say anything, and a wall clock may jump by hours."""

    async def scenario() -> None:
        clock = ManualClock()
        store = DirStore(tmp_path / "s", grace_s=30.0, clock=clock)
        files = [await store.put(write(tmp_path, f"{n}.safetensors", content(100, seed=n))) for n in range(4)]
        for file in files:
            path = store.path(file.sha256)
            assert path is not None
            os.utime(path, (1, 1))  # as old as can be
        assert await store.collect({files[0].sha256}) == 0
        clock.advance(20)
        await store.put(tmp_path / "1.safetensors")  # wanted again: young again
        clock.advance(9)
        assert await store.collect({files[0].sha256, files[2].sha256}) == 0
        clock.advance(1)
        assert await store.collect({files[0].sha256}) == 1
        assert [await store.has(file.sha256) for file in files] == [True, True, True, False]
        clock.advance(30)
        assert await store.collect({files[0].sha256}) == 2

    run(scenario)


def test_collect_spares_the_first_files_of_a_version_that_is_still_being_stored(tmp_path: Path) -> None:
    """Eight shards over a slow line take longer than the grace of the first one."""

    async def scenario() -> None:
        clock = ManualClock()
        store = DirStore(tmp_path / "s", grace_s=30.0, clock=clock)
        first = await store.put(write(tmp_path, "1.safetensors", content(100)))
        began = clock.monotonic()
        for _ in range(10):
            assert await store.collect((), spare_s=clock.monotonic() - began) == 0
            clock.advance(20)
        assert await store.has(first.sha256)
        assert await store.collect(()) == 1

    run(scenario)


# ── over HTTP ──


def test_a_broken_download_goes_on_where_it_broke(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "s") as (trainer, worker, _, _):
            data = content(3 << 20)
            file = await trainer.put(write(tmp_path, "a.safetensors", data))
            part = tmp_path / f"{store_module.PART}{file.sha256}"
            part.write_bytes(data[: 2 << 20])
            before = part.stat().st_ino
            await worker.get(file, tmp_path / "b.safetensors")
            assert (tmp_path / "b.safetensors").read_bytes() == data
            assert (tmp_path / "b.safetensors").stat().st_ino == before
            part.write_bytes(b"x" * (2 << 20))
            with pytest.raises(DigestMismatch):
                await worker.get(file, tmp_path / "c.safetensors")
            await worker.get(file, tmp_path / "c.safetensors")
            part.write_bytes(b"x" * (4 << 20))
            await worker.get(file, tmp_path / "d.safetensors")
            assert (tmp_path / "d.safetensors").read_bytes() == (tmp_path / "c.safetensors").read_bytes() == data

    run(scenario)


def test_ranges(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "s") as (trainer, _, server, tokens), aiohttp.ClientSession() as session:
            data = content(10_000)
            file = await trainer.put(write(tmp_path, "a.safetensors", data))
            url = f"{server.url}/v1/weights/{file.sha256}"
            for asked, status, body in (("bytes=0-9", 206, data[:10]), ("bytes=9990-", 206, data[9990:])):
                headers = {"Authorization": f"Bearer {tokens.worker}", "Range": asked}
                async with session.get(url, headers=headers) as response:
                    assert (response.status, await response.read()) == (status, body)
            headers["Range"] = "bytes=20000-"
            async with session.get(url, headers=headers) as response:
                assert response.status == 416

    run(scenario)


def test_f96_weights_need_a_token_and_workers_do_not_write(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "s") as (_, worker, server, _), aiohttp.ClientSession() as session:
            source = write(tmp_path, "a.safetensors", content(2 << 20))
            with pytest.raises(Forbidden, match="may not write weights"):
                await worker.put(source)
            url = f"{server.url}/v1/weights/{'0' * 64}"
            for method in ("GET", "HEAD", "PUT"):
                async with session.request(method, url) as response:
                    assert response.status == 401
            assert stored(tmp_path / "s") == []

    run(scenario)


def test_uploads_that_lie_are_400_and_invisible(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            served(tmp_path / "s", file_limit_bytes=1000) as (_, _, server, tokens),
            aiohttp.ClientSession() as s,
        ):
            headers = {"Authorization": f"Bearer {tokens.trainers['p']}"}
            for name, body, status in (
                ("0" * 64, b"x", 400),
                ("..%2f..%2fetc", b"x", 400),
                ("A" * 64, b"x", 400),
                ("0" * 64, b"x" * 1001, 413),
            ):
                async with s.put(f"{server.url}/v1/weights/{name}", data=body, headers=headers) as response:
                    assert response.status == status, name
                    assert response.headers["X-AstraFlow-Record"] == "WireError"

            async def endless() -> AsyncIterator[bytes]:
                for _ in range(100):
                    yield b"x" * 100

            async with s.put(f"{server.url}/v1/weights/{'1' * 64}", data=endless(), headers=headers) as response:
                assert response.status == 413
            assert stored(tmp_path / "s") == []

    run(scenario)


def test_an_upload_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "s") as (_, _, server, tokens):
            data = content(1 << 20)
            began = asyncio.Event()

            async def half() -> AsyncIterator[bytes]:
                yield data[: 1 << 19]
                began.set()
                await asyncio.Event().wait()

            headers = {"Authorization": f"Bearer {tokens.trainers['p']}", "Content-Length": str(len(data))}
            async with aiohttp.ClientSession() as session:
                url = f"{server.url}/v1/weights/{hashlib.sha256(data).hexdigest()}"

                async def send() -> None:
                    async with session.put(url, data=half(), headers=headers):
                        raise AssertionError("half a file was answered")

                upload = asyncio.create_task(send())
                await began.wait()
                upload.cancel()
                await asyncio.wait([upload])
            await server.close()
            assert stored(tmp_path / "s") == []

    run(scenario)


def test_a_file_deleted_while_it_is_wanted_is_not_found(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "s") as (trainer, worker, _, _):
            file = await trainer.put(write(tmp_path, "a.safetensors", content(100)))
            (tmp_path / "s" / f"{file.sha256}.safetensors").unlink()
            with pytest.raises(NotFound):
                await worker.get(file, tmp_path / "b")

    run(scenario)


def test_wild_hashes_never_reach_the_network(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "s") as (_, worker, _, _):
            with pytest.raises(BadRequest):
                await worker.has("../x")
            with pytest.raises(AstraFlowError):
                await worker.get(WeightFile(name="a", sha256="x", size_bytes=1), tmp_path / "b")

    run(scenario)
