"""Faults of the field that have no place of their own here, as the kinds that they are: names, and uneven parts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from astraflow.errors import WeightsRefused
from astraflow.types import Manifest
from astraflow.weights.cache import Cache
from astraflow.weights.chain import Chain
from astraflow.weights.digest import digest_files, digest_tensors
from astraflow.weights.publish import Publisher
from astraflow.weights.rebuild import read_weights
from astraflow.weights.settings import WeightSettings
from astraflow.weights.store import DirStore
from astraflow.weights.subscribe import Subscriber
from tests.unit.weights.arrays import Weights, nudge
from tests.unit.weights.chained import start
from tests.unit.weights.test_subscribe import SOON, Engine

# ── F75: another content under the same name ──


def adapter(folder: Path, seed: int) -> Path:
    path = folder / str(seed) / "adapter.safetensors"
    path.parent.mkdir()
    save_file({"lora_A": np.random.default_rng(seed).normal(size=(4, 16)).astype(np.float32)}, str(path))
    return path


def test_f75_an_adapter_update_under_the_same_name_is_taken(tmp_path: Path) -> None:
    """Same policy, same file name, same version number even: what is asked for is what its digest says."""

    async def main() -> None:
        store = DirStore(tmp_path / "store")
        publisher = Publisher(store, "p")
        cache = Cache(store, tmp_path / "cache")
        made: list[tuple[Manifest, Path]] = []
        for seed in (1, 2):
            path = adapter(tmp_path, seed)
            digest = digest_files([path])
            made.append((await publisher.publish(1, [path], digest, base_digest="b" * 64, may_link=False), path))
        for manifest, path in (*made, made[0]):
            (found,) = await cache.fetch(manifest)
            assert found.name == "adapter.safetensors" and found.read_bytes() == path.read_bytes()

    asyncio.run(main())


def test_f75_a_version_that_is_made_again_is_loaded_again_under_its_number(tmp_path: Path) -> None:
    """After a rollback version 1 is other weights; who goes by the number would serve the old ones."""

    async def main() -> None:
        store = DirStore(tmp_path / "store")
        engine = Engine()
        worker = Subscriber("p", store, tmp_path / "worker", engine.load, first_s=0.01)
        task = asyncio.create_task(worker.run())
        for serial, seed in ((1, 1), (2, 2), (3, 1)):
            path = tmp_path / "model.safetensors"
            save_file(start(seed), str(path))
            made = await Publisher(store, "p").publish(1, [path], digest_files([path]), may_link=False)
            worker.offer(msgspec.structs.replace(made, serial=serial))
            await worker.until_loaded(serial, deadline_s=SOON)
            assert engine.digest == made.digest == digest_tensors(start(seed))
        assert engine.versions == [1, 1, 1]
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())


# ── F78: parts that do not divide evenly ──


def bounds(rows: int, ranks: int) -> list[tuple[int, int]]:
    """As torch.chunk does it: 10 over 4 are 3, 3, 3, 1; 2 over 4 are 1, 1 and nothing."""
    size = -(-rows // ranks)
    return [(min(rows, rank * size), min(rows, (rank + 1) * size)) for rank in range(ranks)]


def split(folder: Path, tensors: Weights, parts: int) -> list[Path]:
    """Files of whole tensors, as unevenly as it gets: the first has nearly everything, some have one small tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors, key=lambda name: -tensors[name].nbytes)
    groups = [names[: len(names) - parts + 1], *[[name] for name in names[len(names) - parts + 1 :]]]
    paths = [folder / f"model-{n + 1:05}-of-{parts:05}.safetensors" for n in range(parts)]
    for path, group in zip(paths, groups, strict=True):
        save_file({name: tensors[name] for name in group}, str(path))
    return paths


def rows_of(rows: int, ranks: int) -> Weights:
    """A tensor of so many rows cut over ranks, one tensor each, and one that everybody has."""
    whole = np.arange(1, rows * 3000 + 1, dtype=np.float32).reshape(rows, 3000)
    found = {f"w.{rank}": whole[low:high].copy() for rank, (low, high) in enumerate(bounds(rows, ranks))}
    return {**found, "norm": np.ones(3000, np.float32)}


@pytest.mark.parametrize(("rows", "ranks"), [(10, 3), (10, 4), (2, 4)])
def test_f78_rows_that_do_not_divide_evenly_arrive_in_their_places(tmp_path: Path, rows: int, ranks: int) -> None:
    """By deltas, over files that are uneven too; empty parts are parts."""

    async def main() -> None:
        store = DirStore(tmp_path / "store")
        publisher = Publisher(store, "p", chain=Chain(tmp_path / "chain", WeightSettings(anchor_every=100)))
        cache = Cache(store, tmp_path / "cache")
        tensors = rows_of(rows, ranks)
        for version in range(1, 5):
            files = split(tmp_path / "export" / str(version), tensors, parts=ranks)
            made = await publisher.publish(version, files, digest_files(files), may_link=False)
            found = await cache.fetch(made)
            assert [path.read_bytes() for path in found] == [path.read_bytes() for path in files]
            got = {name: array for path in found for name, array in load_file(str(path)).items()}
            gathered = np.concatenate([got[f"w.{rank}"] for rank in range(ranks)])
            assert np.array_equal(gathered, np.concatenate([tensors[f"w.{rank}"] for rank in range(ranks)]))
            tensors = nudge(tensors, share=0.02, seed=version)
        assert cache.counts["delta"] > 0

    asyncio.run(main())


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_f78_the_digest_does_not_know_how_tensors_are_spread_over_files(tmp_path: Path, parts: int) -> None:
    files = split(tmp_path / "parts", start(), parts)
    assert digest_files(files) == digest_files(files[::-1]) == digest_tensors(start())
    assert read_weights(files).keys() == start().keys()


def test_f78_another_split_of_the_next_version_is_followed(tmp_path: Path) -> None:
    """The tensors are what they are; the files of a version that was rebuilt are those of its base."""

    async def main() -> None:
        store = DirStore(tmp_path / "store")
        publisher = Publisher(store, "p", chain=Chain(tmp_path / "chain", WeightSettings(anchor_every=100)))
        cache = Cache(store, tmp_path / "cache")
        tensors = start()
        for version, parts in enumerate((1, 3, 2, 1), start=1):
            files = split(tmp_path / "export" / str(version), tensors, parts)
            made = await publisher.publish(version, files, digest_files(files), may_link=False)
            assert digest_files(await cache.fetch(made)) == made.digest
            tensors = nudge(tensors, seed=version)

    asyncio.run(main())


def test_f78_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    files = split(tmp_path / "parts", start(), 2)
    (files[0].parent / "again.safetensors").write_bytes(files[1].read_bytes())
    with pytest.raises(WeightsRefused, match="two files"):
        read_weights([*files, files[0].parent / "again.safetensors"])
