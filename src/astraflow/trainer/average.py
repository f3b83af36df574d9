"""The trainer of a policy that is a moving average of another: no batches, no gradients, only versions.

    newest version of the other ─► taken in ─► saved ─► published ─┐
                ▲                                                  │
                └──────────────────────────────────────────────────┘

It waits for nobody and nobody waits for it: versions that pass while it is busy are skipped (``weights.average``). It
may die at any line: what was saved and not published is published by the next life.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from astraflow.clock import Clock
from astraflow.errors import NotFound, StorageFull, Unavailable
from astraflow.observe.waits import Wait
from astraflow.trainer.loop import COMPONENT, Publisher, TrainerIdentity
from astraflow.trainer.scratch import EXPORT, Scratch
from astraflow.types import Manifest
from astraflow.weights.average import MovingAverage
from astraflow.weights.cache import Cache
from astraflow.weights.digest import digest_files
from astraflow.wire import messages as m
from astraflow.wire.goodbye import ENDED, say_goodbye
from astraflow.wire.protocol import Dataflow


@dataclass(kw_only=True, slots=True)
class AverageLoop:
    """``await run()`` returns at the end of the run, or raises the first cause."""

    identity: TrainerIdentity
    source: str
    """Whose versions are averaged."""
    decay: float
    dataflow: Dataflow
    publisher: Publisher
    cache: Cache
    folder: Path
    """Of the average between its lives."""
    clock: Clock
    say: Callable[[str], None] = lambda _: None
    _incarnation: str = ""
    _doing: tuple[str, float, str] = ("starting", 0.0, "")
    _version: int = 0
    """Its newest publication, of whichever life."""
    _scratch: Scratch = field(init=False)

    def __post_init__(self) -> None:
        self._scratch = Scratch(self.folder)

    async def run(self) -> None:
        self._incarnation = self.identity.incarnation or secrets.token_hex(8)
        heartbeat_s = (await self.dataflow.hello(self.identity.hello(self._incarnation))).heartbeat_s
        average = MovingAverage(self.decay)
        await self._begin(average)
        finished = False
        while not finished:
            newest = await self._manifest(self.source)
            if newest.version != average.version:
                with suppress(NotFound):  # deleted because it is old: the newest comes after a beat
                    finished = await self._follow(average, newest)
                    continue
            self._set_doing(Wait.VERSION, f"the next version of {self.source}")
            await self._beat()
            await asyncio.sleep(heartbeat_s)
            finished = (await self.dataflow.status()).state != "running"
        await self.say_goodbye(ENDED)

    async def say_goodbye(self, why: str) -> None:
        await say_goodbye(self.dataflow, COMPONENT, self.identity.name, self._incarnation, self._report(), why=why)

    async def _begin(self, average: MovingAverage) -> None:
        """Where the last life was; at first from its own version 0, as of the oldest version of the other."""
        own = await self._manifest(self.identity.policy)
        self._version = own.version
        if await asyncio.to_thread(average.load, self.folder):
            self.say(f"goes on from {self.folder} with version {average.version} of {self.source} in it")
            newest = await self._manifest(self.source)
            if newest.version == average.version:
                await self._publish(average, await self.cache.fetch(newest), newest.version)
            return
        await asyncio.to_thread(average.begin, 0, await self.cache.fetch(own))

    async def _follow(self, average: MovingAverage, newest: Manifest) -> bool:
        self._set_doing("averages", f"version {newest.version} of {self.source}")
        files = await self.cache.fetch(newest)
        await asyncio.to_thread(average.take, newest.version, files)
        await asyncio.to_thread(average.save, self.folder)
        await self._beat()
        finished = await self._publish(average, files, newest.version)
        await self.cache.trim(newest)
        return finished

    async def _publish(self, average: MovingAverage, like: list[Path], of_version: int) -> bool:
        """Whether the run is finished."""
        self._set_doing(Wait.PUBLISH, f"the average with version {of_version} of {self.source}")
        scratch = self._scratch.make(EXPORT)
        try:
            files = await asyncio.to_thread(average.write, like, scratch)
            digest = await asyncio.to_thread(digest_files, files)
            manifest = await self.publisher.publish(self._version + 1, files, digest)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        request = m.PublishRequest(policy=self.identity.policy, manifest=manifest, of_version=of_version)
        reply = await self.dataflow.publish(request)
        self._version = (await self._manifest(self.identity.policy)).version  # the same weights again are no other
        return reply.finished

    async def _manifest(self, policy: str) -> Manifest:
        return await self.dataflow.manifest(m.ManifestRequest(policy=policy))

    async def _beat(self) -> None:
        request = m.ReportRequest(
            component=COMPONENT, name=self.identity.name, incarnation=self._incarnation, report=self._report()
        )
        # As a trainer's: what follows finds out whether dataflow is there again.
        with suppress(Unavailable, StorageFull):
            await self.dataflow.report(request)

    def _report(self) -> m.ComponentReport:
        doing, since, why = self._doing
        return m.ComponentReport(
            doing=doing,
            since_s=max(0.0, self.clock.monotonic() - since),
            why=why,
            versions={self.identity.policy: self._version},
        )

    def _set_doing(self, doing: str, why: str) -> None:
        self._doing = (str(doing), self.clock.monotonic(), why)
