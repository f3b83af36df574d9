"""A worker follows by deltas: few bytes, the right bits, and full weights when anything about a delta is wrong."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.numpy import save_file

from astraflow.errors import BadRequest, DigestMismatch, NotFound, Unavailable
from astraflow.types import Manifest, WeightDelta
from astraflow.weights.delta_file import CHECK_BYTES
from astraflow.weights.digest import digest_files, digest_tensors
from astraflow.weights.subscribe import Subscriber
from tests.unit.weights.chained import Trainer, start
from tests.unit.weights.test_subscribe import SOON, Engine, GatedStore


class Site:
    """A trainer, a store and one worker."""

    def __init__(self, folder: Path, **settings: int) -> None:
        self.folder = folder
        self.store = GatedStore(folder / "store")
        self.initial = folder / "initial" / "model.safetensors"
        self.initial.parent.mkdir()
        save_file(start(), str(self.initial))
        self.store.inner.put_blocking(self.initial)
        self.settings = settings
        self.trainer = Trainer(self.store, folder, initial=self.initial, **settings)
        self.engine = Engine()
        self.worker = self.another("worker", self.engine)
        self.full = self.initial.stat().st_size

    def another(self, name: str, engine: Engine, **more: Any) -> Subscriber:
        return Subscriber("p", self.store, self.folder / name, engine.load, first_s=0.01, most_s=0.05, **more)

    async def zero(self) -> Manifest:
        file = await self.store.put(self.initial)
        return Manifest(policy="p", version=0, digest=digest_tensors(start()), files=(file,), serial=1)

    async def load(self, manifest: Manifest, worker: Subscriber | None = None) -> int:
        """Bytes that it took."""
        worker = worker or self.worker
        before = worker.cache.downloaded_bytes
        worker.offer(manifest)
        assert await worker.until_loaded(manifest.serial, deadline_s=SOON) == manifest
        return worker.cache.downloaded_bytes - before

    def spoilt(self, delta: WeightDelta, how: Callable[[bytearray], None]) -> WeightDelta:
        """A stored delta with other bytes, under the hash that those have: the store finds nothing wrong with it."""
        data = bytearray((self.folder / "store" / f"{delta.file.sha256}.safetensors").read_bytes())
        how(data)
        path = self.folder / delta.file.name
        path.write_bytes(bytes(data))
        return msgspec.structs.replace(delta, file=self.store.inner.put_blocking(path))


def run(folder: Path, scenario: Callable[[Site], Awaitable[None]], **settings: int) -> Site:
    async def main() -> Site:
        site = Site(folder, **settings)
        task = asyncio.create_task(site.worker.run())
        try:
            async with asyncio.timeout(60):
                await scenario(site)
        finally:
            task.cancel()
            await asyncio.wait([task])
        assert task.cancelled(), task.exception()
        return site

    return asyncio.run(main())


def test_every_version_arrives_to_the_bit_in_few_bytes(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.load(await site.zero())
        for version in range(1, 20):
            manifest = await site.trainer.next()
            took = await site.load(manifest)
            assert site.engine.versions[-1] == version
            assert site.engine.digest == manifest.digest == digest_tensors(site.trainer.weights)
            assert 0 < took < 0.1 * site.full, (version, took)
        assert site.worker.cache.counts == {"full": 1, "delta": 19, "fallback": 0}

    run(tmp_path, scenario)


def test_a_rebuilt_file_is_the_file_that_the_trainer_wrote(tmp_path: Path) -> None:
    """Same names, order, header: a version that came by deltas can be served to others as it is."""

    async def scenario(site: Site) -> None:
        await site.load(await site.zero())
        for _ in range(3):
            last = await site.trainer.next()
            await site.load(last)
        (built,) = (tmp_path / "worker" / last.digest).iterdir()
        save_file(site.trainer.weights, str(tmp_path / "written.safetensors"))
        assert built.read_bytes() == (tmp_path / "written.safetensors").read_bytes()

    run(tmp_path, scenario)


@pytest.mark.parametrize("missed", [2, 7, 20])
def test_catching_up_takes_the_cheapest_way(tmp_path: Path, missed: int) -> None:
    async def scenario(site: Site) -> None:
        await site.load(await site.trainer.next())
        steps = []
        for _ in range(missed):
            last = await site.trainer.next()
            steps.append(min(each.file.size_bytes for each in last.deltas if each.digest == last.digest))
        took = await site.load(last)
        assert took <= min(site.full, sum(steps)) and site.engine.digest == last.digest
        assert site.engine.versions == [1, 1 + missed]

    run(tmp_path, scenario)


def test_a_newcomer_begins_at_the_anchor(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        for _ in range(6):
            last = await site.trainer.next()
        assert last.files_digest
        took = await site.load(last)
        assert site.full < took < 1.3 * site.full and site.engine.digest == last.digest

    run(tmp_path, scenario, anchor_every=4)


def test_a_local_copy_of_version_0_is_a_base_too(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        engine = Engine()
        worker = site.another("local", engine, local=[site.initial.parent])
        task = asyncio.create_task(worker.run())
        took = await site.load(await site.trainer.next(), worker)
        task.cancel()
        assert took < 0.1 * site.full and engine.digest == digest_tensors(site.trainer.weights)

    run(tmp_path, scenario)


@pytest.mark.parametrize("how", ["flipped", "cut", "other bytes"])
def test_a_digest_that_does_not_match_takes_full_loudly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """What finds it is the delta's own check: the store has what it promised."""

    def spoil(data: bytearray) -> None:
        if how == "flipped":
            data[len(data) // 2] ^= 4
        elif how == "cut":
            del data[-3:]
        else:
            data[-CHECK_BYTES:] = bytes(CHECK_BYTES)

    async def scenario(site: Site) -> None:
        await site.load(await site.zero())
        await site.load(await site.trainer.next())
        second = await site.trainer.next()  # an anchor: its full weights are stored too
        assert not second.files_digest
        second = msgspec.structs.replace(second, deltas=tuple(site.spoilt(each, spoil) for each in second.deltas))
        took = await site.load(second)
        assert took >= site.full and site.engine.digest == second.digest
        # Version 1 is held, and version 0: two bases to start from, and nothing but full weights is left.
        assert site.worker.cache.counts["fallback"] == 2 and site.worker.loaded == second

    with caplog.at_level(logging.WARNING, "astraflow.weights"):
        site = run(tmp_path, scenario, anchor_every=2)
    assert "weights_delta_failed policy=p version=2" in caplog.text and "from full weights" in caplog.text
    assert site.worker.counts["failures"] == 0


def test_a_delta_that_leads_elsewhere_than_its_manifest_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A good delta, to other weights: the digest of the result decides, the label does not move to it."""

    async def scenario(site: Site) -> None:
        one = await site.trainer.next()
        await site.load(one)
        two = await site.trainer.next()
        other = Trainer(site.store, tmp_path / "other", initial=site.initial)
        await other.next()
        wrong = (await other.next(seed=99)).deltas[-1]
        assert other.weights.keys() == site.trainer.weights.keys()
        lied = tuple(msgspec.structs.replace(each, file=wrong.file) for each in two.deltas)
        with pytest.raises(DigestMismatch):
            await site.worker.cache.fetch(msgspec.structs.replace(two, deltas=lied))
        await site.load(two)
        assert site.engine.versions == [1, 2] and site.engine.digest == two.digest

    run(tmp_path, scenario)
    assert caplog.text.count("weights_delta_failed") == 2  # from what was held, then from the anchor


def test_a_base_that_rotted_in_the_cache(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        one = await site.trainer.next()
        await site.load(one)
        (path,) = (tmp_path / "worker" / one.digest).iterdir()
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        two = await site.trainer.next()
        await site.load(two)
        assert site.engine.digest == two.digest and site.worker.cache.counts["fallback"] == 1

    run(tmp_path, scenario)


def test_a_base_that_is_gone_from_the_disk(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        one = await site.trainer.next()
        await site.load(one)
        shutil.rmtree(tmp_path / "worker" / one.digest)
        two = await site.trainer.next()
        await site.load(two)
        assert site.engine.digest == two.digest and site.worker.cache.counts["fallback"] == 1
        assert site.worker.counts["failures"] == 0

    run(tmp_path, scenario)


def test_f76_files_in_use_are_not_trimmed(tmp_path: Path) -> None:
    """A pinned version waits for its turn to be loaded while newer ones come and the cache is tidied."""

    async def scenario(site: Site) -> None:
        one = await site.trainer.next()
        await site.load(one)
        with site.worker.cache.kept(one):
            files = await site.worker.cache.fetch(one)
            for _ in range(3):
                await site.load(await site.trainer.next())
            assert digest_files(files) == one.digest
        last = await site.trainer.next()
        await site.load(last)
        await site.worker.cache.trim(last)
        assert not any(path.exists() for path in files)

    run(tmp_path, scenario)


def test_f73_after_a_failure_weights_and_label_are_as_before(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        one = await site.trainer.next()
        await site.load(one)
        (path,) = (tmp_path / "worker" / one.digest).iterdir()
        before = path.read_bytes()
        two = await site.trainer.next()
        site.store.errors = [Unavailable("no route")] * 3
        site.worker.offer(two)
        while site.store.errors:
            assert site.worker.loaded == one and path.read_bytes() == before
            await asyncio.sleep(0.01)
        await site.worker.until_loaded(two.serial, deadline_s=SOON)
        assert site.engine.versions == [1, 2] and site.worker.counts["failures"] == 3

    run(tmp_path, scenario)


def test_f76_a_pull_during_two_publishes_ends_as_it_began(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.load(await site.trainer.next())
        two = await site.trainer.next()
        site.store.gate.clear()
        site.store.began.clear()
        site.worker.offer(two)
        await site.store.began.wait()
        assert site.worker.pulling == two.serial
        three, four = await site.trainer.next(), await site.trainer.next()
        site.worker.offer(three)
        site.worker.offer(four)
        site.store.gate.set()
        await site.worker.until_loaded(four.serial, deadline_s=SOON)
        assert site.engine.versions == [1, 2, 4] and site.engine.digest == four.digest
        assert site.worker.pulling is None

    run(tmp_path, scenario)


def test_f76_deltas_deleted_while_they_are_pulled_start_over(tmp_path: Path) -> None:
    """Nobody kept them: superseded cleanly, and the newest is reached from its anchor; never a mixture."""

    async def scenario(site: Site) -> None:
        await site.load(await site.trainer.next())
        two = await site.trainer.next()
        site.store.gate.clear()
        site.store.began.clear()
        site.worker.offer(two)
        await site.store.began.wait()
        for _ in range(3):
            last = await site.trainer.next()
        await site.store.collect({each.sha256 for each in last.stored})
        site.store.gate.set()
        with pytest.raises(NotFound):
            await site.another("late", Engine()).cache.fetch(two)
        site.worker.offer(last)
        await site.worker.until_loaded(last.serial, deadline_s=SOON)
        assert site.engine.digest == last.digest and site.engine.versions[-1] == 5 and 3 not in site.engine.versions

    run(tmp_path, scenario, anchor_every=4)


def test_a_trainer_that_starts_again_is_followed_by_digest(tmp_path: Path) -> None:
    """From its checkpoint of version 3 while the worker is at 5: back, and the same steps forward again."""

    async def scenario(site: Site) -> None:
        made = [await site.trainer.next() for _ in range(3)]
        checkpoint = site.trainer.weights
        made += [await site.trainer.next() for _ in range(2)]
        for each in made[-3:]:
            await site.load(each)
        again = Trainer(site.store, tmp_path, initial=site.initial, epoch=2, **site.settings)
        again.weights, again.version, again.serial = checkpoint, 3, made[-1].serial
        resumed = await again.publish()
        assert resumed.digest == made[2].digest and not resumed.files_digest
        assert await site.load(resumed) <= site.full
        four = await again.next()
        assert four.digest == made[3].digest  # the same bits, made again
        assert await site.load(four) < 0.1 * site.full
        other = await again.next(seed=77)
        assert other.digest != made[4].digest and await site.load(other) < 0.1 * site.full
        assert site.engine.versions == [3, 4, 5, 3, 4, 5] and site.engine.digest == other.digest

    run(tmp_path, scenario)


def test_a_rollback_is_followed(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        made = [await site.trainer.next() for _ in range(5)]
        await site.load(made[-1])
        back = msgspec.structs.replace(made[1], serial=made[-1].serial + 1)  # as it was published
        await site.load(back)
        assert site.engine.versions == [5, 2] and site.engine.digest == made[1].digest

    run(tmp_path, scenario)


def test_a_new_run_under_an_old_name_is_followed(tmp_path: Path) -> None:
    """Its version 1 is another one; nothing of the old run's version 1 is taken for it."""

    async def scenario(site: Site) -> None:
        for _ in range(2):
            old = await site.trainer.next()
            await site.load(old)
        new = Trainer(site.store, tmp_path / "new", initial=site.initial)
        new.serial = old.serial  # serials begin with the time of day
        one = await new.next(seed=55)
        await site.load(one)
        assert site.engine.digest == one.digest == digest_tensors(new.weights)
        assert site.worker.loaded is not None and site.worker.loaded.version == 1

    run(tmp_path, scenario)


def test_steps_between_two_anchors_are_followed_while_full_weights_alternate(tmp_path: Path) -> None:
    """Versions that are hardly smaller as deltas travel in full, in between those that are not."""

    async def scenario(site: Site) -> None:
        for version, share in enumerate([0.01, 0.9, 0.01, 0.01, 0.9, 0.01], 1):
            made = await site.trainer.next(share=share)
            await site.load(made)
            assert site.engine.digest == made.digest and site.engine.versions[-1] == version

    run(tmp_path, scenario, anchor_every=1)


def test_wild_deltas_in_a_manifest_write_nothing(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.trainer.next()
        made = await site.trainer.next()
        (delta, *_) = made.deltas
        for wild in (
            msgspec.structs.replace(delta, file=msgspec.structs.replace(delta.file, sha256="../../x")),
            msgspec.structs.replace(delta, file=msgspec.structs.replace(delta.file, name="../x")),
            msgspec.structs.replace(delta, file=msgspec.structs.replace(delta.file, size_bytes=-1)),
            msgspec.structs.replace(delta, base_digest="../x"),
            msgspec.structs.replace(delta, digest="A" * 64),
        ):
            with pytest.raises(BadRequest):
                await site.worker.cache.fetch(msgspec.structs.replace(made, deltas=(wild,)))
        with pytest.raises(BadRequest):
            await site.worker.cache.fetch(msgspec.structs.replace(made, files_digest="../x"))
        assert list((tmp_path / "worker").iterdir()) == []

    run(tmp_path, scenario)


def test_the_cache_stays_small(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        for _ in range(6):
            last = await site.trainer.next()
            await site.load(last)
        await asyncio.sleep(0.05)  # the trim after it
        found = [path for path in (tmp_path / "worker").rglob("*") if path.is_file()]
        assert len(found) == 2 and all(path.stat().st_size == site.full for path in found)
        assert digest_files([path for path in found if path.parent.name == last.digest]) == last.digest

    run(tmp_path, scenario)
