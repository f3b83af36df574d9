"""Object stores pass the kit of every weight store: in memory, in a folder, over S3 from a server on this machine."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
import pytest

from astraflow.errors import ConfigError, DigestMismatch, Forbidden, NotFound, ProtocolError, StorageFull, Unavailable
from astraflow.run.chaos.proxy import Proxy
from astraflow.testing.check_store import check_store, content, write
from astraflow.testing.virtual_clock import ManualClock
from astraflow.types import WeightFile
from astraflow.weights import object_store as module
from astraflow.weights.object_store import ObjectStore
from astraflow.weights.store import PART
from astraflow.wire.rate import ByteRate
from tests.conformance.s3 import BUCKET, bucket, local_s3


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(90):
            await scenario()

    asyncio.run(main())


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    with local_s3() as url:
        yield url


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


# ── the kit ──


def test_memory_conforms(scratch: Path) -> None:
    memory = obstore.store.MemoryStore()
    run(lambda: check_store(ObjectStore(memory), ObjectStore(memory), scratch))


def test_folder_conforms(tmp_path: Path, scratch: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    run(lambda: check_store(ObjectStore.open(url), ObjectStore.open(url), scratch))
    assert not [path for path in scratch.iterdir() if path.name.startswith(PART)]


def test_s3_conforms(s3: str, scratch: Path) -> None:
    """Single and multipart uploads (the kit's largest file is smaller than a part; one of 9 MiB follows)."""
    mine, theirs = ObjectStore.open(f"s3://{BUCKET}/kit"), ObjectStore(bucket(s3), prefix="kit/weights")
    run(lambda: check_store(mine, theirs, scratch))

    async def large() -> None:
        data = content(9 << 20, seed=7)
        file = await mine.put(write(scratch, "large.safetensors", data))
        await theirs.get(file, scratch / "back")
        assert (scratch / "back").read_bytes() == data

    run(large)


# ── what each must do beyond it ──


def test_a_broken_pull_goes_on_where_it_broke(s3: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        store = ObjectStore(bucket(s3), prefix="resume")
        data = content(3 << 20)
        file = await store.put(write(tmp_path, "a.safetensors", data))
        part = tmp_path / f"{PART}{file.sha256}"
        part.write_bytes(data[: 2 << 20])
        before = part.stat().st_ino
        await store.get(file, tmp_path / "b")
        assert (tmp_path / "b").read_bytes() == data and (tmp_path / "b").stat().st_ino == before
        part.write_bytes(bytes(2 << 20))
        with pytest.raises(DigestMismatch):
            await store.get(file, tmp_path / "c")
        assert not part.exists() and not (tmp_path / "c").exists()
        await store.get(file, tmp_path / "c")

    run(scenario)


async def proxied(s3: str) -> tuple[Proxy, ObjectStore]:
    proxy = Proxy()
    port = await proxy.open()
    target = urlsplit(s3)
    proxy.lead_to(str(target.hostname), int(target.port or 0))
    store = ObjectStore(bucket(f"http://127.0.0.1:{port}"), prefix="proxied", attempts=4, first_s=0.05)
    return proxy, store


def test_cut_connections_are_gone_on_with(s3: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        proxy, store = await proxied(s3)
        data = content(4 << 20, seed=1)
        file = await store.put(write(tmp_path, "a.safetensors", data))
        proxy.slow = True
        pull = asyncio.create_task(store.get(file, tmp_path / "b"))
        part = tmp_path / f"{PART}{file.sha256}"
        while not (part.exists() and part.stat().st_size >= 1 << 20):  # noqa: ASYNC110 - a file tells nobody
            await asyncio.sleep(0.05)
        arrived = part.stat().st_size
        proxy.cut = True
        await asyncio.sleep(0.05)
        proxy.cut, proxy.slow = False, False
        await pull
        assert (tmp_path / "b").read_bytes() == data and arrived < len(data)
        await proxy.close()

    run(scenario)


def test_f80_a_bucket_that_is_gone_ends_the_pull_with_a_reason(s3: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        proxy, store = await proxied(s3)
        file = await store.put(write(tmp_path, "a.safetensors", content(1000, seed=2)))
        proxy.cut = True
        for call in (store.get(file, tmp_path / "b"), store.has(file.sha256), store.put(tmp_path / "a.safetensors")):
            with pytest.raises(Unavailable) as caught:
                await call
            assert "\n" not in str(caught.value)
        assert not (tmp_path / "b").exists()
        proxy.cut = False
        await store.get(file, tmp_path / "b")
        await proxy.close()

    run(scenario)


def memory_store(**settings: Any) -> tuple[Any, ObjectStore]:
    memory = obstore.store.MemoryStore()
    return memory, ObjectStore(memory, attempts=2, first_s=0.01, **settings)


def test_bad_bytes_are_found(tmp_path: Path) -> None:
    async def scenario() -> None:
        memory, store = memory_store()
        data = content(5000)
        file = await store.put(write(tmp_path, "a.safetensors", data))
        key = f"weights/{file.sha256}.safetensors"
        for wrong, error in (
            (bytes([data[0] ^ 1]) + data[1:], DigestMismatch),
            (data + b"x", ProtocolError),
            (data[:-1], Unavailable),
        ):
            await obstore.put_async(memory, key, wrong)
            with pytest.raises(error, match=r"a\.safetensors"):
                await store.get(file, tmp_path / "b")
            assert not (tmp_path / "b").exists()
            (tmp_path / f"{PART}{file.sha256}").unlink(missing_ok=True)
        await obstore.put_async(memory, key, data)
        await store.get(file, tmp_path / "b")

    run(scenario)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        _, store = memory_store()
        file = await store.put(write(tmp_path, "a.safetensors", content(5000)))

        async def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(ObjectStore, "_write", full)
        with pytest.raises(StorageFull):
            await store.get(file, tmp_path / "b")
        assert not (tmp_path / "b").exists()
        monkeypatch.undo()
        await store.get(file, tmp_path / "b")

    run(scenario)


def test_refused_credentials_are_forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No retry helps: the run ends with a sentence instead of waiting."""

    async def refused(*_: Any, **__: Any) -> None:
        raise obstore.exceptions.PermissionDeniedError("403\nwith a body that nobody wants to read")

    for call in ("head_async", "put_async"):
        monkeypatch.setattr(module.obstore, call, refused)
    _, store = memory_store()
    with pytest.raises(Forbidden, match="refuses these credentials"):
        asyncio.run(store.put(write(tmp_path, "a.safetensors", b"x")))


def test_only_the_owner_collects_and_only_what_is_old_and_unwanted(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        memory = obstore.store.MemoryStore()
        owner, reader = ObjectStore(memory, owner=True, grace_s=30.0, clock=clock), ObjectStore(memory)
        files = [await owner.put(write(tmp_path, f"{n}.safetensors", content(100, seed=n))) for n in range(3)]
        await obstore.put_async(memory, "weights/notes.txt", b"not ours")
        await obstore.put_async(memory, f"elsewhere/{files[0].sha256}.safetensors", b"not ours")
        clock.advance(100)
        assert await reader.collect(()) == 0 == await owner.collect({files[0].sha256})
        clock.advance(29)
        assert await owner.collect({files[0].sha256, files[1].sha256}) == 0
        clock.advance(1)
        assert await owner.collect({files[0].sha256, files[1].sha256}, spare_s=1.0) == 0
        assert await owner.collect({files[0].sha256}) == 1
        assert [await reader.has(file.sha256) for file in files] == [True, True, False]
        clock.advance(31)
        assert await owner.collect(()) == 1  # the one that was unwanted before; the other only since now
        listed = obstore.list(memory)
        assert {str(meta["path"]).split("/")[0] for batch in listed for meta in batch} == {"weights", "elsewhere"}

    run(scenario)


def test_a_prefix_belongs_to_one_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        _, store = memory_store()
        await store.claim("host:/runs/a")
        await store.claim("host:/runs/a")
        with pytest.raises(ConfigError, match=r"belongs to the run host:/runs/a"):
            await store.claim("host:/runs/b")

    run(scenario)


def test_a_prefix_inside_that_of_another_run_loses_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        memory = obstore.store.MemoryStore()
        outer, inner = (
            ObjectStore(memory, prefix=prefix, owner=True, grace_s=1.0, clock=clock)
            for prefix in ("runs/weights", "runs/weights/7/weights")
        )
        file = await inner.put(write(tmp_path, "a.safetensors", content(100)))
        other = await outer.put(write(tmp_path, "b.safetensors", content(100, seed=1)))
        for owner in (outer, inner):
            await owner.collect({other.sha256} if owner is outer else {file.sha256})
        clock.advance(10)
        assert await outer.collect({other.sha256}) == 0 == await inner.collect({file.sha256})
        assert await inner.has(file.sha256) and await outer.has(other.sha256)

    run(scenario)


def test_a_rate_holds_in_both_directions(tmp_path: Path) -> None:
    async def scenario() -> None:
        _, store = memory_store(rate=ByteRate(1_000_000))
        loop = asyncio.get_running_loop()
        began = loop.time()
        file = await store.put(write(tmp_path, "a.safetensors", content(400_000)))
        sent = loop.time()
        await store.get(file, tmp_path / "b")
        assert sent - began >= 0.25 and loop.time() - sent >= 0.25
        assert (tmp_path / "b").read_bytes() == content(400_000)

    run(scenario)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "bucket",
        "ftp://x/y",
        "memory:///",
        "s3://",
        "file://",
        "file:///",
        "file:///..",
        "file:///a/../",
        "file:///%2E",
    ],
)
def test_urls_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="weight store"):
        ObjectStore.open(url)


def test_absent_files_leave_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        _, store = memory_store()
        absent = WeightFile(name="a", sha256=hashlib.sha256(b"x").hexdigest(), size_bytes=1)
        with pytest.raises(NotFound):
            await store.get(absent, tmp_path / "a")

    run(scenario)
    assert not list(tmp_path.iterdir())
