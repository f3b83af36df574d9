"""Following a policy's weights: newest wins, a begun pull ends, failures keep what is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from astraflow.errors import BadRequest, DigestMismatch, TimedOut, Unavailable, WeightsRefused
from astraflow.types import Manifest, WeightFile
from astraflow.weights.digest import digest_files
from astraflow.weights.manifest import manifest_of_folder
from astraflow.weights.publish import Publisher
from astraflow.weights.store import DirStore
from astraflow.weights.subscribe import Subscriber
from tests.unit.weights.files import manifest, model

SOON = 10.0


class GatedStore:
    """A DirStore whose ``get`` can be held or made to fail."""

    def __init__(self, folder: Path) -> None:
        self.inner = DirStore(folder, grace_s=-10.0)
        self.gate = asyncio.Event()
        self.gate.set()
        self.began = asyncio.Event()
        self.errors: list[Exception] = []
        self.gets: list[str] = []

    async def put(self, path: Path, *, may_link: bool = False) -> WeightFile:
        return await self.inner.put(path, may_link=may_link)

    async def get(self, file: WeightFile, into: Path) -> None:
        self.gets.append(file.name)
        self.began.set()
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        await self.inner.get(file, into)

    async def has(self, sha256: str) -> bool:
        return await self.inner.has(sha256)

    async def collect(self, keep: Any, *, spare_s: float = 0.0) -> int:
        return await self.inner.collect(keep, spare_s=spare_s)


class Engine:
    """Holds the digest of what it was told to load; may refuse."""

    def __init__(self) -> None:
        self.digest = ""
        self.versions: list[int] = []
        self.errors: list[Exception] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def load(self, found: Manifest, files: Sequence[Path]) -> None:
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        self.digest = await asyncio.to_thread(digest_files, list(files))
        self.versions.append(found.version)


class World:
    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.store = GatedStore(folder / "store")
        self.engine = Engine()
        self.subscriber = Subscriber(
            "p", self.store, folder / "cache", self.engine.load, first_s=0.01, most_s=0.05, **settings
        )

    async def publish(
        self, version: int, *, serial: int | None = None, seed: int | None = None, shards: int = 1
    ) -> Manifest:
        folder = model(
            self.folder / f"export-{version}-{serial}", seed=version if seed is None else seed, shards=shards
        )
        files = sorted(folder.glob("*.safetensors"))
        found = await Publisher(self.store, "p").publish(version, files, digest_files(files), 3)
        assert (found.trainer_epoch, found.form) == (3, manifest_of_folder(folder).form)
        return msgspec.structs.replace(found, serial=version + 1 if serial is None else serial)

    async def load(self, found: Manifest) -> None:
        self.subscriber.offer(found)
        await self.subscriber.until_loaded(found.serial, deadline_s=SOON)


def run(folder: Path, scenario: Callable[[World], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        world = World(folder, **settings)
        task = asyncio.create_task(world.subscriber.run())
        try:
            async with asyncio.timeout(30):
                await scenario(world)
        finally:
            task.cancel()
            await asyncio.wait([task])
        assert task.cancelled(), task.exception()

    asyncio.run(main())


def test_follows_serials_not_versions(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        one, two = await world.publish(1), await world.publish(2)
        await world.load(one)
        await world.load(two)
        world.subscriber.offer(one)  # older news: nothing happens
        back = msgspec.structs.replace(one, serial=9)  # a rollback moves down
        await world.load(back)
        assert world.engine.versions == [1, 2, 1]
        assert world.subscriber.loaded == back and world.engine.digest == one.digest

    run(tmp_path, scenario)


def test_f56_label_moves_only_after_the_load(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        five, six = await world.publish(5), await world.publish(6)
        await world.load(five)
        world.engine.gate.clear()
        world.subscriber.offer(six)
        with pytest.raises(TimedOut, match="serial 7 of p was not loaded"):
            await world.subscriber.until_loaded(7, deadline_s=0.05)
        assert world.subscriber.loaded == five
        world.engine.gate.set()
        assert await world.subscriber.until_loaded(7, deadline_s=SOON) == six

    run(tmp_path, scenario)


def test_f56_after_a_failed_load_the_label_stays_and_the_failure_is_told(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        six, seven = await world.publish(6), await world.publish(7)
        await world.load(six)
        world.engine.errors = [WeightsRefused("missing tensor lm_head")] * 1000
        world.subscriber.offer(seven)
        with pytest.raises(TimedOut, match="weights refused at v7 of p: missing tensor lm_head"):
            await world.subscriber.until_loaded(8, deadline_s=0.3)
        assert world.subscriber.loaded == six and world.engine.versions == [6]
        assert world.subscriber.counts["failures"] > 1
        world.engine.errors = []
        await world.subscriber.until_loaded(8, deadline_s=SOON)
        assert world.subscriber.error is None

    run(tmp_path, scenario)


def test_an_offer_that_came_during_a_load_ends_no_later_pause(tmp_path: Path) -> None:
    """A version that cannot be loaded is tried again with back-off, not as fast as the machine can."""

    async def scenario(world: World) -> None:
        six, seven = await world.publish(6), await world.publish(7)
        world.engine.gate.clear()
        world.subscriber.offer(six)
        await world.store.began.wait()
        world.subscriber.offer(seven)
        world.engine.errors = [WeightsRefused("six"), *[WeightsRefused("missing tensor lm_head")] * 10_000]
        world.engine.gate.set()
        await asyncio.sleep(0.3)
        assert 2 < world.subscriber.counts["failures"] < 40  # pauses of 10 to 50 ms

    run(tmp_path, scenario)


def test_f76_a_begun_pull_ends_and_then_comes_the_newest(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        three, four, five, six = [await world.publish(v, shards=2) for v in (3, 4, 5, 6)]
        world.store.gate.clear()
        world.subscriber.offer(three)
        await world.store.began.wait()
        for newer in (four, five, six):
            world.subscriber.offer(newer)
        world.store.gate.set()
        await world.subscriber.until_loaded(six.serial, deadline_s=SOON)
        assert world.engine.versions == [3, 6] and world.engine.digest == six.digest
        assert world.subscriber.counts["superseded"] >= 2

    run(tmp_path, scenario)


def test_f76_a_version_deleted_while_pulled_is_superseded_cleanly(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        three, six = await world.publish(3, shards=2), await world.publish(6, shards=2)
        world.store.gate.clear()
        world.subscriber.offer(three)
        await world.store.began.wait()
        world.subscriber.offer(six)
        assert await world.store.collect({file.sha256 for file in six.files}) == 1
        world.store.gate.set()
        await world.subscriber.until_loaded(six.serial, deadline_s=SOON)
        assert world.engine.versions == [6] and world.engine.digest == six.digest
        assert world.subscriber.counts["failures"] == 0

    run(tmp_path, scenario)


def test_f76_parts_of_two_versions_are_never_loaded(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        three, five = await world.publish(3, shards=2), await world.publish(5, shards=2)
        mixed = msgspec.structs.replace(three, files=(three.files[0], five.files[1]))
        world.subscriber.offer(mixed)
        with pytest.raises(TimedOut, match="should have digest"):
            await world.subscriber.until_loaded(mixed.serial, deadline_s=0.3)
        assert world.engine.versions == [] and world.subscriber.loaded is None
        await world.load(five)

    run(tmp_path, scenario)


def test_f77_one_of_several_fails_and_catches_up(tmp_path: Path) -> None:
    async def main() -> None:
        worlds = [World(tmp_path / str(n)) for n in range(3)]
        store = worlds[0].store
        for world in worlds[1:]:
            world.subscriber = Subscriber(
                "p", store, world.folder / "cache", world.engine.load, first_s=60.0, most_s=60.0
            )
        tasks = [asyncio.create_task(world.subscriber.run()) for world in worlds]
        versions = [await worlds[0].publish(v) for v in (5, 6, 7)]
        for world in worlds:
            await world.load(versions[0])
        worlds[1].engine.errors = [RuntimeError("CUDA out of memory")]
        for world in worlds:
            world.subscriber.offer(versions[1])
        for world in (worlds[0], worlds[2]):
            await world.subscriber.until_loaded(versions[1].serial, deadline_s=SOON)
        with pytest.raises(TimedOut, match="RuntimeError: CUDA out of memory"):
            await worlds[1].subscriber.until_loaded(versions[1].serial, deadline_s=0.3)
        assert worlds[1].subscriber.loaded == versions[0]
        for world in worlds:
            await world.load(versions[2])  # a newer offer ends the back-off of 60 s
        assert [world.engine.versions for world in worlds] == [[5, 6, 7], [5, 7], [5, 6, 7]]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def bounded() -> None:
        async with asyncio.timeout(30):
            await main()

    asyncio.run(bounded())


@pytest.mark.parametrize("error", [Unavailable("no route"), DigestMismatch("bits"), OSError("disk"), ValueError("odd")])
def test_a_failed_pull_is_tried_again(tmp_path: Path, error: Exception) -> None:
    async def scenario(world: World) -> None:
        world.store.errors = [error, error]
        await world.load(await world.publish(1))
        assert world.subscriber.counts == {"loads": 1, "failures": 2, "superseded": 0}

    run(tmp_path, scenario)


def test_a_local_copy_of_the_same_digest_downloads_nothing(tmp_path: Path) -> None:
    local = model(tmp_path / "base", seed=4)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"x")

    async def scenario(world: World) -> None:
        found = await asyncio.to_thread(manifest, local)
        await world.load(found)  # the store does not even have it
        assert world.store.gets == [] and world.subscriber.cache.downloaded_bytes == 0
        assert world.engine.digest == found.digest
        await world.load(await world.publish(1))
        assert world.store.gets == ["model.safetensors"]

    run(tmp_path, scenario, local=[tmp_path / "nowhere", tmp_path / "broken", local])


def test_an_unchanged_part_is_not_downloaded_again(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        one, two = await world.publish(1, shards=2), await world.publish(2, shards=2)
        assert one.files[0].sha256 == two.files[0].sha256
        await world.load(one)
        await world.load(two)
        assert world.store.gets == [one.files[0].name, one.files[1].name, two.files[1].name]
        assert world.engine.digest == two.digest

    run(tmp_path, scenario)


def test_the_cache_is_bounded_and_reused(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        versions = [await world.publish(v) for v in range(1, 5)]
        for found in versions:
            await world.load(found)
        await world.load(msgspec.structs.replace(versions[3], serial=40))  # the trim before it has ended
        cached = sorted(path.name for path in (tmp_path / "cache").iterdir())
        assert cached == sorted(found.digest for found in versions[2:])
        gets = len(world.store.gets)
        await world.load(msgspec.structs.replace(versions[2], serial=50))
        assert len(world.store.gets) == gets

    run(tmp_path, scenario)


def test_a_cached_file_that_rotted_is_fetched_again(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        one, two = await world.publish(1), await world.publish(2)
        await world.load(one)
        await world.load(two)
        path = tmp_path / "cache" / one.digest / "model.safetensors"
        data = bytearray(path.read_bytes())
        path.unlink()
        data[-1] ^= 1
        path.write_bytes(data)
        await world.load(msgspec.structs.replace(one, serial=50))
        assert world.engine.digest == one.digest and len(world.store.gets) == 3

    run(tmp_path, scenario)


def test_wild_manifests_write_nothing(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        one = await world.publish(1)
        for wild in ({"digest": "../../x"}, {"files": (msgspec.structs.replace(one.files[0], name="../x"),)}):
            with pytest.raises(BadRequest):
                await world.subscriber.cache.fetch(msgspec.structs.replace(one, **wild))
        with pytest.raises(ValueError, match="of q"):
            world.subscriber.offer(msgspec.structs.replace(one, policy="q"))
        assert list((tmp_path / "cache").iterdir()) == []

    run(tmp_path, scenario)


def test_publishing_again_gives_the_same_manifest(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        assert await world.publish(1) == await world.publish(1)
        with pytest.raises(BadRequest, match="no files"):
            await Publisher(world.store, "p").publish(1, [], "0" * 64)
        with pytest.raises(BadRequest):
            Publisher(world.store, "../p")

    run(tmp_path, scenario)
