"""What is stored again is as if it were stored now: a version that names it next finds it there, whoever tidies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import obstore
import pytest

from astraflow.errors import Forbidden, NotFound
from astraflow.testing.check_store import content, write
from astraflow.testing.virtual_clock import ManualClock
from astraflow.types import WeightFile
from astraflow.weights.object_store import ObjectStore
from astraflow.weights.store import PART, DirStore, WeightStore
from tests.conformance.test_stores import run, served


async def outlives_its_grace(owner: WeightStore, writer: WeightStore, clock: ManualClock, scratch: Path) -> None:
    """The trainer died between the upload and the commit, and starts again just before the file would go."""
    source = write(scratch, "w.safetensors", content(5000))
    file = await writer.put(source)
    assert await owner.collect(()) == 0
    clock.advance(29)
    assert await writer.put(source) == file
    clock.advance(5)
    assert await owner.collect(()) == 0, "what was put again 5 s ago went away"
    assert await owner.collect({file.sha256}) == 0  # and now its manifest is committed
    assert await writer.has(file.sha256)
    assert await owner.collect(()) == 0
    clock.advance(31)
    assert await owner.collect(()) == 1
    await writer.put(source)
    assert await writer.has(file.sha256), "what was deleted is stored anew"


def test_a_folder_makes_it_young(tmp_path: Path) -> None:
    clock = ManualClock()
    store = DirStore(tmp_path / "s", grace_s=30.0, clock=clock)
    run(lambda: outlives_its_grace(store, store, clock, tmp_path))


def test_dataflows_folder_makes_it_young_for_a_trainer_elsewhere(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        owner = DirStore(tmp_path / "s", grace_s=30.0, clock=clock)
        async with served(tmp_path / "s") as (trainer, _, _, _):
            await outlives_its_grace(owner, trainer, clock, tmp_path)

    run(scenario)


def test_a_bucket_makes_it_young(tmp_path: Path) -> None:
    clock = ManualClock()
    bucket = ObjectStore(obstore.store.MemoryStore(), owner=True, grace_s=30.0, clock=clock)
    run(lambda: outlives_its_grace(bucket, bucket, clock, tmp_path))


def test_a_file_that_is_there_is_not_sent_again_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "s") as (trainer, worker, _, _):
            source = write(tmp_path, "w.safetensors", content(100_000))
            file = await trainer.put(source)
            monkeypatch.setattr("astraflow.wire.transfer._parts", None)  # whoever sends bytes now, fails
            path = tmp_path / "s" / f"{file.sha256}.safetensors"
            os.utime(path, (1, 1))
            assert await trainer.put(source) == file
            assert path.stat().st_mtime > 1e9
            with pytest.raises(Forbidden):  # a worker makes nothing young
                await worker.put(source)

    run(scenario)


def crossed(store: DirStore, monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> None:
    """``act`` comes between the moment in which a file is found to be old and the one in which it goes."""
    real = store._remove

    def late(path: Path, date: int) -> bool:
        act()
        return real(path, date)

    monkeypatch.setattr(store, "_remove", late)


def test_f76_a_put_that_crosses_the_collection_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        store = DirStore(tmp_path / "s", grace_s=1.0, clock=clock)
        source = write(tmp_path, "w.safetensors", content(500))
        file = store.put_blocking(source)
        await store.collect(())
        clock.advance(10)
        crossed(store, monkeypatch, lambda: store.put_blocking(source))
        assert await store.collect(()) == 0
        assert await store.has(file.sha256)
        assert not list((tmp_path / "s").glob(f"{PART}*"))
        await store.get(file, tmp_path / "copy")

    run(scenario)


def test_two_who_tidy_at_once_count_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        one, other = (DirStore(tmp_path / "s", grace_s=1.0, clock=clock) for _ in range(2))
        file = one.put_blocking(write(tmp_path, "w.safetensors", content(500)))
        for store in (one, other):
            await store.collect(())
        clock.advance(10)
        removed: list[int] = []
        crossed(one, monkeypatch, lambda: removed.append(other._collect(frozenset(), 1.0)))
        removed.append(await one.collect(()))
        assert sorted(removed) == [0, 1] and not await one.has(file.sha256)

    run(scenario)


def test_an_object_put_again_while_the_bucket_was_listed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        memory = obstore.store.MemoryStore()
        store = ObjectStore(memory, owner=True, grace_s=1.0, clock=clock)
        sources = [write(tmp_path, f"{n}.safetensors", content(500, seed=n)) for n in range(2)]
        files = [await store.put(source) for source in sources]
        await store.collect(())
        clock.advance(10)
        real = store._is_still

        async def late(key: str, mark: Any) -> bool:
            if files[0].sha256 in key:
                await store.put(sources[0])
            return await real(key, mark)

        monkeypatch.setattr(store, "_is_still", late)
        assert await store.collect(()) == 1
        assert [await store.has(file.sha256) for file in files] == [True, False]

    run(scenario)


def test_f80_a_relay_that_has_another_size_under_the_hash_is_not_believed(tmp_path: Path) -> None:
    """``held`` tells what is there by the server's word, not by what was asked for."""

    async def scenario() -> None:
        async with served(tmp_path / "s") as (trainer, worker, _, _):
            file = await trainer.put(write(tmp_path, "w.safetensors", content(5000)))
            assert await worker._transfer.held(file) == 5000
            for size in (0, 4999, 5001, 1 << 40):
                asked = WeightFile(name=file.name, sha256=file.sha256, size_bytes=size)
                assert await worker._transfer.held(asked) is None
            absent = WeightFile(name="x", sha256="0" * 64, size_bytes=5)
            assert await worker._transfer.held(absent) is None
            with pytest.raises(NotFound):
                await worker.get(absent, tmp_path / "x")

    asyncio.run(scenario())
