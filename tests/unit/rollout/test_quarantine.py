"""A worker whose weights cannot be loaded: it goes on within the bound, else it is quarantined and says why."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest

from astraflow.errors import DigestMismatch, Starved, TimedOut
from astraflow.observe.status import status_lines
from astraflow.observe.waits import QUARANTINED
from astraflow.rollout.served import Load, ServedPolicy
from astraflow.rollout.service import RolloutService
from astraflow.testing.fake_engine import FakeEngine
from astraflow.testing.virtual_loop import run_virtual
from astraflow.types import Episode, Lease, Manifest
from astraflow.weights.store import DirStore
from astraflow.weights.subscribe import Subscriber
from astraflow.wire import messages as m
from tests.unit.dataflow.rig import Rig
from tests.unit.dataflow.test_starving import starved_rig
from tests.unit.rollout.test_service import DONE, ScriptedDataflow, leases, service, taking

CAUSE = "digest mismatch at v14 of main: the engine holds other bits than were published"


class NoFiles:
    """A cache for manifests that name none."""

    counts: ClassVar[dict[str, int]] = {}
    downloaded_bytes = 0
    decode_s = 0.0

    async def fetch(self, manifest: Manifest) -> Sequence[Path]:
        return []

    def kept(self, manifest: Manifest) -> AbstractContextManager[None]:
        return nullcontext()

    async def forget(self, manifest: Manifest) -> None: ...

    async def trim(self, manifest: Manifest) -> None: ...


def follower(folder: Path, load: Load) -> Subscriber:
    """The real one."""
    found = Subscriber("main", DirStore(folder / "store"), folder / "cache", load)
    found.cache = NoFiles()  # type: ignore[assignment]
    return found


class Refusing:
    """An engine that does not hold what was published, from version 14 until ``well``."""

    def __init__(self, folder: Path, *, max_staleness: int | None = 0, first: int = 14) -> None:
        self.first, self.until = first, 10**6
        engine = FakeEngine(policy="main", before_load=self._attest)
        self.served = ServedPolicy(
            "main",
            engine,
            lambda load: follower(folder, load),
            max_staleness=max_staleness,
        )

    def _attest(self, manifest: Manifest) -> None:
        if self.first <= manifest.version < self.until:
            raise DigestMismatch("the engine holds other bits than were published")

    def worker(self, dataflow: Any, player: Any, **settings: Any) -> RolloutService:
        return service(dataflow, player, policies={"main": self.served}, **settings)


def reports(dataflow: ScriptedDataflow) -> list[m.ComponentReport]:
    return [beat.report for beat in dataflow.beats]


def quarantined_report(folder: Path) -> m.ComponentReport:
    async def main() -> m.ComponentReport:
        dataflow = ScriptedDataflow(newest=14, finish=False)
        task = asyncio.ensure_future(Refusing(folder).worker(dataflow, taking(1.0)).run())
        await asyncio.sleep(9)
        task.cancel()
        await asyncio.wait([task])
        return reports(dataflow)[-1]

    return run_virtual(main)


def test_one_that_holds_no_weights_is_quarantined_with_the_cause(tmp_path: Path) -> None:
    report = quarantined_report(tmp_path)
    assert (report.doing, report.why, report.versions) == (QUARANTINED, CAUSE, {})
    assert 5 < report.since_s < 9  # since it began, not since the last beat


def test_status_and_the_diagnosis_of_starvation_name_it(tmp_path: Path) -> None:
    report = quarantined_report(tmp_path)

    def said(rig: Rig) -> None:
        rig.go(rig.flow.renew(m.RenewRequest(worker="b2", incarnation="b2", report=report)))

    with starved_rig("stop") as rig:
        said(rig)
        (line,) = [each for each in status_lines(rig.go(rig.flow.status())) if each.startswith("rollout b2")]
        assert f"quarantined for {report.since_s:.1f} s: {CAUSE}" in line
        (pooled,) = [each for each in rig.go(rig.flow.pool()).workers if each.name == "b2"]
        assert pooled.reason == f"quarantined: {CAUSE}"
        epoch = rig.resume()
        for _ in range(14):
            rig.advance(5)
            said(rig)
        with pytest.raises(Starved, match=f"0 workers serve it; b2 quarantined: {CAUSE}"):
            rig.batch(epoch)


def newest_after(folder: Path, max_staleness: int | None, newest: int) -> tuple[ScriptedDataflow, int]:
    """v13 is held, then ``newest`` is announced and cannot be loaded. And how many leases were taken since."""

    async def main() -> tuple[ScriptedDataflow, int]:
        refusing = Refusing(folder, max_staleness=max_staleness)
        dataflow = ScriptedDataflow(*leases(40), newest=13, finish=False)
        task = asyncio.ensure_future(refusing.worker(dataflow, taking(1.5)).run())
        await asyncio.sleep(5)
        dataflow.newest = newest
        await asyncio.sleep(8)
        before = len(dataflow.waiting)
        await asyncio.sleep(10)
        taken = before - len(dataflow.waiting)
        task.cancel()
        await asyncio.wait([task])
        return dataflow, taken

    return run_virtual(main)


@pytest.mark.parametrize(("max_staleness", "newest"), [(1, 14), (2, 15), (None, 90)])
def test_f77_within_the_bound_it_serves_what_it_holds_and_says_what_failed(
    tmp_path: Path, max_staleness: int | None, newest: int
) -> None:
    dataflow, taken = newest_after(tmp_path, max_staleness, newest)
    last = reports(dataflow)[-1]
    assert taken > 5 and last.versions == {"main": 13}
    assert last.doing.startswith("playing ") and f"digest mismatch at v{newest} of main" in last.why


@pytest.mark.parametrize(("max_staleness", "newest"), [(0, 14), (1, 15)])
def test_f77_beyond_the_bound_it_is_out_of_rotation(tmp_path: Path, max_staleness: int, newest: int) -> None:
    dataflow, taken = newest_after(tmp_path, max_staleness, newest)
    last = reports(dataflow)[-1]
    assert taken == 0 and last.versions == {"main": 13}
    assert last.doing == QUARANTINED and f"digest mismatch at v{newest} of main" in last.why


def test_f77_a_rollback_that_cannot_be_loaded_is_not_staleness(tmp_path: Path) -> None:
    """What a newer version sampled may be trained: its age is 0 until that version is reached again."""

    async def main() -> m.ComponentReport:
        refusing = Refusing(tmp_path, max_staleness=0, first=10**6)
        dataflow = Undone(*leases(40), newest=14, finish=False)
        task = asyncio.ensure_future(refusing.worker(dataflow, taking(1.0)).run())
        await asyncio.sleep(5)
        refusing.first, dataflow.newest, dataflow.serial = 3, 5, 99
        await asyncio.sleep(8)
        task.cancel()
        await asyncio.wait([task])
        return reports(dataflow)[-1]

    last = run_virtual(main)
    assert last.doing.startswith("playing ") and "digest mismatch at v5 of main" in last.why


class Undone(ScriptedDataflow):
    serial = 15

    @property
    def manifests(self) -> dict[str, Manifest]:
        found = Manifest(policy="main", version=self.newest, digest=f"d{self.newest}", files=(), serial=self.serial)
        return {"main": found}


def test_f77_it_serves_again_once_a_version_can_be_loaded(tmp_path: Path) -> None:
    async def main() -> ScriptedDataflow:
        refusing = Refusing(tmp_path)
        dataflow = ScriptedDataflow(*leases(8), newest=13)
        task = asyncio.ensure_future(refusing.worker(dataflow, taking(4.0)).run())
        await asyncio.sleep(3)
        dataflow.newest = 14
        await asyncio.sleep(20)
        assert reports(dataflow)[-1].doing == QUARANTINED
        assert len(dataflow.submitted) < 6  # what it had begun, it ended
        refusing.until, dataflow.newest = 15, 15
        await task
        return dataflow

    dataflow = run_virtual(main)
    assert len(dataflow.submitted) == 8
    last = reports(dataflow)[-1]
    assert last.doing != QUARANTINED and not last.why.startswith("digest") and last.versions == {"main": 15}


def test_a_quarantine_without_an_end_ends_the_worker_with_the_cause(tmp_path: Path) -> None:
    """Its successor begins with an empty cache and a new engine."""

    async def main() -> float:
        refusing = Refusing(tmp_path)
        dataflow = ScriptedDataflow(*leases(1), newest=13, finish=False)
        task = asyncio.ensure_future(refusing.worker(dataflow, quick, patience_s=40.0).run())
        await asyncio.sleep(3)
        dataflow.newest = 14
        began = asyncio.get_running_loop().time()
        with pytest.raises(TimedOut, match=CAUSE):
            await task
        return asyncio.get_running_loop().time() - began

    assert 38 < run_virtual(main) < 60


def test_a_quarantined_worker_that_is_told_to_stop_ends_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        refusing = Refusing(tmp_path)
        dataflow = ScriptedDataflow(newest=14, finish=False)
        worker = refusing.worker(dataflow, quick)
        task = asyncio.ensure_future(worker.run())
        await asyncio.sleep(5)
        worker.stop()
        async with asyncio.timeout(2):
            await task

    run_virtual(main)


async def quick(lease: Lease) -> Episode:
    return DONE
