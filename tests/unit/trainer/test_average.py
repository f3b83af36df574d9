"""The loop of a moving average beside a dataflow that cannot always answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from astraflow.clock import SystemClock
from astraflow.errors import AstraFlowError, Fenced, StorageFull, Unavailable
from astraflow.trainer.average import AverageLoop
from astraflow.trainer.loop import TrainerIdentity
from astraflow.types import Manifest
from astraflow.weights.cache import Cache
from astraflow.weights.digest import digest_files
from astraflow.weights.publish import Publisher
from astraflow.weights.store import DirStore
from astraflow.wire import messages as m


class Told:
    """A dataflow in memory for a loop that follows ``s``; the run ends when the loop has nothing more to do."""

    def __init__(self, *manifests: Manifest) -> None:
        self.newest = {each.policy: each for each in manifests}
        self.reported: list[int] = []

    async def hello(self, request: Any) -> m.HelloReply:
        return m.HelloReply(run="r", config_digest="", heartbeat_s=0.0, dead_after_s=1.0)

    async def manifest(self, request: m.ManifestRequest) -> Manifest:
        return self.newest[request.policy]

    async def publish(self, request: m.PublishRequest) -> m.PublishReply:
        own = self.newest[request.policy]
        if own.digest != request.manifest.digest:
            self.newest[request.policy] = msgspec.structs.replace(request.manifest, version=own.version + 1)
        return m.PublishReply(serial=1)

    async def report(self, request: m.ReportRequest) -> None:
        self.reported.append(request.report.versions["m"])

    async def status(self) -> Any:
        return SimpleNamespace(state="finished")


async def life(flow: Any, store: DirStore, folder: Path) -> None:
    await AverageLoop(
        identity=TrainerIdentity(policy="m", name="m"),
        source="s",
        decay=0.5,
        dataflow=flow,
        publisher=Publisher(store, "m"),
        cache=Cache(store, folder / "cache"),
        folder=folder / "average",
        clock=SystemClock(),
    ).run()


async def made(store: DirStore, folder: Path, policy: str, version: int, value: float) -> Manifest:
    path = folder / f"{policy}-{version}.safetensors"
    save_file({"w": np.full((2, 2), value, np.float32)}, str(path))
    return await Publisher(store, policy).publish(version, [path], digest_files([path]), may_link=False)


def test_every_life_reports_the_version_that_is_published(tmp_path: Path) -> None:
    async def main() -> None:
        store = DirStore(tmp_path / "store")
        (tmp_path / "average").mkdir()
        flow = Told(await made(store, tmp_path, "s", 5, 1.0), await made(store, tmp_path, "m", 25, 0.0))
        await life(flow, store, tmp_path)
        assert (flow.newest["m"].version, flow.reported) == (26, [25, 26, 26])
        flow.reported.clear()
        await life(flow, store, tmp_path)
        assert (flow.newest["m"].version, set(flow.reported)) == (26, {26}), "the same average again is no version more"
        flow.newest["s"] = await made(store, tmp_path, "s", 6, 2.0)
        await life(flow, store, tmp_path)
        assert (flow.newest["m"].version, flow.reported[-1]) == (27, 27)

    asyncio.run(main())


class Deaf:
    """Of a dataflow, the one call that a heartbeat is."""

    def __init__(self, error: AstraFlowError) -> None:
        self.error = error
        self.asked = 0

    async def report(self, request: Any) -> None:
        self.asked += 1
        raise self.error


def beat(error: AstraFlowError, folder: Path) -> Deaf:
    deaf: Any = Deaf(error)
    nothing: Any = None
    loop = AverageLoop(
        identity=TrainerIdentity(policy="p", name="t-p"),
        source="q",
        decay=0.9,
        dataflow=deaf,
        publisher=nothing,
        cache=nothing,
        folder=folder,
        clock=SystemClock(),
    )
    asyncio.run(loop._beat())
    found: Deaf = deaf
    return found


@pytest.mark.parametrize("error", [Unavailable("it restarts"), StorageFull("no space")])
def test_a_heartbeat_that_nobody_hears_does_not_end_the_average(error: AstraFlowError, tmp_path: Path) -> None:
    assert beat(error, tmp_path).asked == 1


def test_one_that_is_refused_does(tmp_path: Path) -> None:
    with pytest.raises(Fenced):
        beat(Fenced("another has the name"), tmp_path)
