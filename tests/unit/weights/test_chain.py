"""What a publisher offers: recent deltas, merged ones, full weights now and then; nothing that it has forgotten."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astraflow.errors import ConfigError, FullTransferNeeded, StorageFull, WeightsRefused
from astraflow.types import Manifest, WeightFile
from astraflow.weights import chain as chain_module
from astraflow.weights import delta_file
from astraflow.weights.chain import Chain
from astraflow.weights.delta import apply_delta, encode_delta, read_header
from astraflow.weights.delta_file import parse
from astraflow.weights.digest import digest_tensors, form_of
from astraflow.weights.plan import plan_path
from astraflow.weights.settings import WeightSettings
from astraflow.weights.store import DirStore
from astraflow.weights.tensors import of_array
from tests.unit.weights.arrays import copy, nudge, same
from tests.unit.weights.chained import Trainer, start


def spans(manifest: Manifest, digests: list[str]) -> set[tuple[int, int]]:
    return {(digests.index(each.base_digest), digests.index(each.digest)) for each in manifest.deltas}


async def some(trainer: Trainer, count: int, **how: Any) -> list[Manifest]:
    return [await trainer.next(**how) for _ in range(count)]


def test_the_first_is_full_then_come_deltas_and_anchors(tmp_path: Path) -> None:
    async def main() -> None:
        store = DirStore(tmp_path / "store")
        made = await some(Trainer(store, tmp_path, keep=4, anchor_every=3), 8)
        assert [each.files_digest == "" for each in made] == [True, False, False, True, False, False, True, False]
        assert made[4].files == made[3].files and made[4].files_digest == made[3].digest
        digests = [each.digest for each in made]
        assert spans(made[1], digests) == {(0, 1)}
        assert spans(made[4], digests) == {(0, 1), (1, 2), (0, 2), (2, 3), (3, 4), (2, 4), (0, 4)}
        assert spans(made[7], digests) == {(3, 4), (4, 5), (5, 6), (4, 6), (6, 7)}  # the last four steps
        form = form_of(of_array(name, array) for name, array in start().items())
        for each in made:
            assert all([await store.has(file.sha256) for file in each.stored]) and each.form == form

    asyncio.run(main())


def test_every_delta_leads_where_it_says(tmp_path: Path) -> None:
    async def main() -> None:
        store = DirStore(tmp_path / "store")
        trainer = Trainer(store, tmp_path, keep=8)
        states, made = [], []
        for _ in range(9):
            made.append(await trainer.next())
            states.append(copy(trainer.weights))
        by_digest = {digest_tensors(state): state for state in states}
        assert set(by_digest) == {each.digest for each in made}
        for link in made[-1].deltas:
            path = store.path(link.file.sha256)
            assert path is not None
            delta = path.read_bytes()
            assert read_header(delta)[:2] == (link.base_digest, link.digest)
            apply_delta(held := copy(by_digest[link.base_digest]), delta)
            assert same(held, by_digest[link.digest])

    asyncio.run(main())


def test_version_1_starts_from_what_the_launcher_published(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    async def main() -> None:
        store = DirStore(tmp_path / "store")
        initial = tmp_path / "model.safetensors"
        save_file(start(), str(initial))
        zero = await store.put(initial)
        first = await Trainer(store, tmp_path, initial=initial).next()
        assert first.files == (zero,) and first.files_digest == digest_tensors(start())
        assert [each.base_digest for each in first.deltas] == [first.files_digest]
        resumed = Trainer(store, tmp_path, initial=initial, epoch=2)
        resumed.version = 4  # a checkpoint of another version: nothing is known of what was published before
        assert (await resumed.next()).files_digest == ""

    asyncio.run(main())


def test_again_gives_the_same_and_a_failed_put_changes_nothing(tmp_path: Path) -> None:
    class Full(DirStore):
        left = 100

        async def put(self, path: Path, *, may_link: bool = False) -> WeightFile:
            if self.left == 0:
                raise StorageFull("no space")
            self.left -= 1
            return await super().put(path, may_link=may_link)

    async def main() -> None:
        store = Full(tmp_path / "store")
        trainer = Trainer(store, tmp_path, keep=4, anchor_every=2)
        made = await some(trainer, 2)
        again = await trainer.publish()
        assert again.digest == made[-1].digest and again.deltas == made[-1].deltas
        trainer.step()
        for left in (0, 1, 2, 0):
            store.left = left
            with pytest.raises(StorageFull):
                await trainer.publish()
        store.left = 100
        third = await trainer.publish()
        digests = [each.digest for each in (*made, third)]
        assert spans(third, digests) == {(0, 1), (1, 2), (0, 2)} and third.files_digest == ""

    asyncio.run(main())


def test_what_is_hardly_smaller_travels_in_full_and_is_not_tried_again_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = 0
    encode = Chain._encode

    def counted(self: Chain, *args: Any) -> Any:
        nonlocal tried
        tried += 1
        return encode(self, *args)

    monkeypatch.setattr(Chain, "_encode", counted)

    async def main() -> None:
        trainer = Trainer(DirStore(tmp_path / "store"), tmp_path, anchor_every=4)
        made = await some(trainer, 2) + await some(trainer, 6, share=0.9)
        assert [bool(each.deltas) for each in made] == [False, True] + [False] * 6
        assert all(each.files_digest == "" for each in made[2:])
        assert tried == 3  # the second version, the third in vain, then only the seventh
        made = await some(trainer, 8)
        assert [bool(each.deltas) for each in made] == [False] * 2 + [True] * 6

    asyncio.run(main())


def test_another_form_travels_in_full(tmp_path: Path) -> None:
    async def main() -> None:
        trainer = Trainer(DirStore(tmp_path / "store"), tmp_path)
        await some(trainer, 2)
        del trainer.weights["layer.norm"]
        made = await trainer.publish()
        assert made.version == 2 and made.deltas == () and made.files_digest == ""

    asyncio.run(main())


def test_a_swept_folder_is_another_beginning(tmp_path: Path) -> None:
    """Another trainer of the policy has taken over; this one is refused at its commit, not here."""
    import shutil

    async def main() -> None:
        trainer = Trainer(DirStore(tmp_path / "store"), tmp_path)
        await some(trainer, 3)
        shutil.rmtree(tmp_path / "chain-1")
        made = await trainer.next()
        assert made.deltas == () and made.files_digest == ""

    asyncio.run(main())


def test_20_missed_versions_take_no_more_than_the_sum_of_their_deltas(tmp_path: Path) -> None:
    async def main() -> None:
        trainer = Trainer(DirStore(tmp_path / "store"), tmp_path)
        made = await some(trainer, 30)
        have, want = made[-21], made[-1]
        plan = plan_path({have.digest}, want)
        assert plan is not None
        steps: dict[str, int] = {}
        for before, each in zip(made[-21:-1], made[-20:], strict=True):
            steps[each.digest] = next(
                link.file.size_bytes
                for link in each.deltas
                if (link.base_digest, link.digest) == (before.digest, each.digest)
            )
        full = sum(file.size_bytes for file in made[0].files)
        assert len(steps) == 20 and plan.size_bytes <= min(full, sum(steps.values()))
        assert len(plan.deltas) < 8  # merged ones are among them

    asyncio.run(main())


def test_the_folder_goes_with_the_process(tmp_path: Path) -> None:
    async def main() -> None:
        trainer = Trainer(DirStore(tmp_path / "store"), tmp_path, keep=2)
        await some(trainer, 6)
        names = sorted(path.name for path in (tmp_path / "chain-1").iterdir())
        assert sum(name.startswith("weights") for name in names) == 1, names
        deltas = [name for name in names if name.startswith("delta-")]
        assert 2 <= len(deltas) <= 3, names  # those of two steps, and both merged
        assert len(names) == 1 + len(deltas), names  # not compacted: what travels is what is merged, and written once

    asyncio.run(main())
    gc.collect()
    assert not (tmp_path / "chain-1").exists()


def test_what_travels_is_compact_and_merged_of_what_is_not(tmp_path: Path) -> None:
    """Steps of which small weights change more often: every link, merged ones too, has classes and leads on."""

    async def main() -> None:
        store = DirStore(tmp_path / "store")
        trainer = Trainer(store, tmp_path, keep=8, compact=True)
        rng = np.random.default_rng(0)
        masters = rng.normal(size=200_000) * 0.1
        states, made = [], []
        for _ in range(5):
            trainer.weights = {"w": masters.astype(np.float16)}
            trainer.version += 1
            made.append(await trainer.publish())
            states.append(trainer.weights)
            masters = masters + 4e-7 * rng.normal(size=len(masters))
        at = {digest_tensors(state): state for state in states}
        assert len(made[-1].deltas) > 5
        for link in made[-1].deltas:
            path = store.path(link.file.sha256)
            assert path is not None and parse(path.read_bytes()).schemes
            apply_delta(held := copy(at[link.base_digest]), path.read_bytes())
            assert same(held, at[link.digest])
        names = {path.name for path in (tmp_path / "chain-1").iterdir()}
        for begun in [name.removeprefix("delta-") for name in names if name.startswith("delta-")]:
            assert f"plain-{begun}" in names  # what will be merged
        trainer.weights = {"w": np.where(np.arange(len(masters)) % 5, states[-1]["w"], np.float16(7))}
        trainer.version += 1
        await trainer.publish()  # equally likely changes: compacting saves nothing
        names = {path.name for path in (tmp_path / "chain-1").iterdir()}
        assert "delta-4-5.safetensors" in names and "plain-4-5.safetensors" not in names

    asyncio.run(main())


@pytest.mark.parametrize(("name", "value"), [("keep", 0), ("keep", 257), ("anchor_every", 0)])
def test_settings_out_of_range(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"WeightSettings.{name} must be in \[1, \d+\], found {value}"):
        WeightSettings(**{name: value})


def test_a_delta_that_no_receiver_would_take_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    old = start()
    new = nudge(old, share=0.05, seed=1)
    monkeypatch.setattr(delta_file, "MAX_INDEX_BYTES", 50)
    with pytest.raises(FullTransferNeeded, match=r"its index takes \d+ bytes; at most 50 may: full transfer needed"):
        encode_delta(old, new)


@pytest.mark.parametrize("compact", [False, True])
def test_where_two_deltas_are_too_much_for_one_there_is_no_merged_one_and_publishing_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compact: bool
) -> None:
    def too_much(*_: object, **__: object) -> bytes:
        raise WeightsRefused("delta: unpacked, both take more than one may")

    monkeypatch.setattr(chain_module, "merge_deltas", too_much)
    monkeypatch.setattr(chain_module, "compact_delta", too_much)

    async def main() -> None:
        made = await some(Trainer(DirStore(tmp_path / "store"), tmp_path, keep=4, anchor_every=8, compact=compact), 5)
        digests = [each.digest for each in made]
        assert spans(made[4], digests) == {(0, 1), (1, 2), (2, 3), (3, 4)}

    asyncio.run(main())


@pytest.mark.parametrize("nonsense", [[1.0], None, "w"])
def test_what_is_no_array_is_named(nonsense: Any) -> None:
    with pytest.raises(WeightsRefused, match=r"tensor 'w' is a builtins\.\w+, no numpy array; of torch tensors"):
        encode_delta({"w": nonsense}, {"w": nonsense})
