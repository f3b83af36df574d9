"""A part of the way to a version is not in the store: another way, full weights, or a message that says what helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from astraflow.errors import NotFound
from astraflow.types import Manifest, WeightDelta
from tests.unit.weights.test_following_deltas import Site, run
from tests.unit.weights.test_subscribe import Engine


def step(manifest: Manifest, base: str) -> WeightDelta:
    """The delta that leads from ``base`` right to the manifest's version."""
    return next(each for each in manifest.deltas if (each.base_digest, each.digest) == (base, manifest.digest))


def lose(site: Site, sha256: str) -> None:
    (site.folder / "store" / f"{sha256}.safetensors").unlink()


def test_a_delta_that_is_gone_is_gone_around_and_the_base_stays(tmp_path: Path) -> None:
    """By the anchor and the delta that was merged of two; what was held may be a base for the next one still."""

    async def scenario(site: Site) -> None:
        one = await site.trainer.next()
        await site.load(one)
        two = await site.trainer.next()
        lose(site, step(two, one.digest).file.sha256)
        await site.load(two)
        assert site.engine.digest == two.digest and site.worker.cache.counts["fallback"] == 1
        assert one.digest in site.worker.cache._held

    run(tmp_path, scenario, anchor_every=100)


def test_where_nothing_leads_around_the_base_stays_and_the_next_full_version_is_taken(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        one, two = await site.trainer.next(), await site.trainer.next()
        await site.load(two)
        three = await site.trainer.next()
        for delta in three.deltas:
            lose(site, delta.file.sha256)
        with pytest.raises(NotFound, match="no way leads to version 3 of p, neither from the 1 that are held"):
            await site.worker.cache.fetch(three)
        assert two.digest in site.worker.cache._held and one.serial < two.serial
        four = await site.trainer.next()
        assert not four.files_digest  # every fourth is published in full
        await site.load(four)

    run(tmp_path, scenario, anchor_every=4)


def test_without_any_way_the_message_says_what_is_missing_and_what_ends_it(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        first = await site.trainer.next()
        second = await site.trainer.next()
        lose(site, site.store.inner.put_blocking(site.initial).sha256)
        newcomer = site.another("newcomer", Engine())
        with pytest.raises(NotFound) as caught:
            await newcomer.cache.fetch(second)
        assert str(caught.value).startswith("no way leads to version 2 of p, neither from the 0 that are held nor")
        assert "model.safetensors" in str(caught.value) and "the next one that is published in full" in str(
            caught.value
        )
        assert first.digest != second.digest

    run(tmp_path, scenario, anchor_every=100)


def test_an_anchor_that_is_gone_is_made_anew_with_the_next_version(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.trainer.next()
        lose(site, site.store.inner.put_blocking(site.initial).sha256)
        healed = await site.trainer.next()
        assert healed.files_digest == "" and healed.deltas  # in full, and by the delta for those who have the last one
        newcomer = site.another("newcomer", Engine())
        await newcomer.cache.fetch(healed)
        assert newcomer.cache.counts["full"] == 1
        after = await site.trainer.next()
        assert after.files_digest == healed.digest

    run(tmp_path, scenario, anchor_every=100)


def test_what_is_there_is_not_stored_again(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        for _ in range(3):
            made = await site.trainer.next()
            assert made.files_digest, "the anchor is there: nothing is published in full"

    run(tmp_path, scenario, anchor_every=100)
