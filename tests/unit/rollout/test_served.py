"""A served policy knows weights by their digest, and a worker whose engine holds something else serves nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astraflow.engines.attested import AttestedEngine
from astraflow.errors import EngineFailed
from astraflow.observe.waits import QUARANTINED
from astraflow.rollout.served import ServedPolicy
from astraflow.testing.fake_engine import FakeEngine
from astraflow.testing.virtual_loop import run_virtual
from astraflow.types import Manifest
from astraflow.weights.tensors import of_array
from astraflow.wire import messages as m
from tests.unit.rollout.test_quarantine import follower, reports
from tests.unit.rollout.test_service import ScriptedDataflow, leases, service, taking


def manifest_of(version: int, serial: int, digest: str = "") -> Manifest:
    return Manifest(policy="main", version=version, digest=digest or f"d{version}", files=(), serial=serial)


class Forgetful(FakeEngine):
    """Acknowledges version ``at`` without taking it, so many times."""

    def __init__(self, *, at: int, times: int) -> None:
        super().__init__(policy="main")
        self.at, self.times = at, times

    async def load(self, manifest: Manifest, files: list[Path]) -> None:
        if manifest.version == self.at and self.times > 0:
            self.times -= 1
            return
        await super().load(manifest, files)


def played(folder: Path, times: int, max_staleness: int) -> tuple[ScriptedDataflow, list[m.ComponentReport]]:
    """v13 is held, then v14 comes and is acknowledged only, so many times; and the reports after each second."""

    async def main() -> tuple[ScriptedDataflow, list[m.ComponentReport]]:
        engine = AttestedEngine(Forgetful(at=14, times=times))
        served = ServedPolicy("main", engine, lambda load: follower(folder, load), max_staleness=max_staleness)
        dataflow = ScriptedDataflow(*leases(30), newest=13, finish=False)
        task = asyncio.ensure_future(service(dataflow, taking(0.5), policies={"main": served}).run())
        await asyncio.sleep(3)
        dataflow.newest = 14
        await asyncio.sleep(12)
        task.cancel()
        await asyncio.wait([task])
        return dataflow, reports(dataflow)

    return run_virtual(main)


def test_f77_an_acknowledged_version_that_is_not_held_is_named_in_the_workers_report(tmp_path: Path) -> None:
    _, said = played(tmp_path, times=10**6, max_staleness=0)
    assert said[-1].doing == QUARANTINED and said[-1].versions == {"main": 13}
    assert said[-1].why == ("never applied at v14 of main: the engine acknowledged the version and holds v13")
    assert said[-1].metrics["weights/refused"] >= 2


def test_a_version_that_is_taken_at_the_second_try_ends_the_quarantine(tmp_path: Path) -> None:
    dataflow, said = played(tmp_path, times=1, max_staleness=0)
    assert said[-1].versions == {"main": 14} and said[-1].doing != QUARANTINED
    assert (said[-1].metrics["weights/refused"], said[-1].metrics["weights/attested"]) == (1, 2)
    assert len(dataflow.submitted) > 10


class Wrong(FakeEngine):
    """Says that it holds what it was given; ``holds_wrong`` versions it does not."""

    holds_wrong: tuple[int, ...] = (14,)

    def tensors(self, version: int) -> Any:
        return [of_array("stray", np.ones(3, np.float32))] if version in self.holds_wrong else []


def test_one_that_holds_wrong_weights_serves_nothing_even_within_the_bound(tmp_path: Path) -> None:
    """What it held before is gone: it cannot go on with that, as after a load that failed."""

    async def main() -> tuple[ScriptedDataflow, int]:
        engine = AttestedEngine(Wrong(policy="main"))
        served = ServedPolicy("main", engine, lambda load: follower(tmp_path, load), max_staleness=8)
        dataflow = ScriptedDataflow(*leases(60), newest=13, finish=False)
        task = asyncio.ensure_future(service(dataflow, taking(0.5), policies={"main": served}).run())
        await asyncio.sleep(3)
        dataflow.newest = 14
        await asyncio.sleep(8)
        before = len(dataflow.waiting)
        await asyncio.sleep(6)
        taken = before - len(dataflow.waiting)
        task.cancel()
        await asyncio.wait([task])
        return dataflow, taken

    dataflow, taken = run_virtual(main)
    last = reports(dataflow)[-1]
    assert taken == 0 and last.doing == QUARANTINED
    assert last.why == "partial at v14 of main: tensor stray is held and was not published"


# ── by digest ──


class Manifests:
    """Dataflow, as far as ``hold`` asks it."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest_now = manifest

    async def manifest(self, request: m.ManifestRequest) -> Manifest:
        return self.manifest_now


def served_of(folder: Path, versions_held: int) -> ServedPolicy:
    engine = FakeEngine(policy="main", versions_held=versions_held)
    return ServedPolicy("main", engine, lambda load: follower(folder, load), pin_wait_s=5.0)


async def following(served: ServedPolicy, *manifests: Manifest) -> asyncio.Task[None]:
    task = asyncio.ensure_future(served.subscriber.run())
    for manifest in manifests:
        served.subscriber.offer(manifest)
        await served.subscriber.until_loaded(manifest.serial, deadline_s=5)
    return task


def test_a_pinned_version_of_the_same_number_after_a_rollback_is_not_taken_for_held(tmp_path: Path) -> None:
    async def main() -> None:
        served = served_of(tmp_path, versions_held=2)
        task = await following(served, manifest_of(5, 5, "before"))
        again = Manifests(manifest_of(5, 9, "after"))
        await served.hold(5, again, deadline_s=5)  # type: ignore[arg-type]
        assert served.engine.info().digests == {5: "after"}
        task.cancel()

    run_virtual(main)


def test_a_pinned_version_that_cannot_be_had_under_its_digest_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        served = served_of(tmp_path, versions_held=1)
        task = await following(served, manifest_of(5, 5, "newer"))
        with pytest.raises(EngineFailed, match="version 5 is not held"):
            await served.hold(5, Manifests(manifest_of(5, 2, "undone")), deadline_s=5)  # type: ignore[arg-type]
        task.cancel()

    run_virtual(main)


def test_an_update_waits_for_a_lease_that_is_pinned_to_other_weights_of_the_same_number(tmp_path: Path) -> None:
    async def main() -> float:
        served = served_of(tmp_path, versions_held=1)
        task = await following(served, manifest_of(5, 5, "before"))
        loop = asyncio.get_running_loop()
        with served.pinned(5):
            served.subscriber.offer(manifest_of(5, 9, "after"))
            await asyncio.sleep(3)
            assert served.engine.info().digests == {5: "before"}
        began = loop.time()
        await served.subscriber.until_loaded(9, deadline_s=5)
        assert served.engine.info().digests == {5: "after"}
        task.cancel()
        return loop.time() - began

    assert run_virtual(main) < 1
