"""A weight store by way of other workers, and for them: the nearest holder first, the origin whenever that fails.

    get ─► a relay of the region that has it ─► one that gets it for the region ─► origin ─► a relay elsewhere

A worker with a data port (``shelf``) is a relay: what it got it has at hand for others, and what it is asked for it
gets from a holder or the origin, never by asking another relay to get it: so nobody waits in a circle, and a file
crosses to a region as often as that has relays.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from astraflow.clock import Clock, SystemClock
from astraflow.errors import AstraFlowError, Unavailable
from astraflow.types import WeightFile
from astraflow.weights.neighbours import Neighbours
from astraflow.weights.shelf import Shelf
from astraflow.weights.store import PART, SUFFIX, WeightStore
from astraflow.wire.messages import RelayPlace

log = logging.getLogger("astraflow.weights")

MOST_FLIGHTS = 16
"""Files that a relay gets at once; who asks for more is sent on to the origin."""
REFUSED_S = 10.0
"""How long a file that could not be got is not tried again for others."""


class RelayStore:
    """``origin`` is a store that needs no relay. Used from one event loop; ``close`` in the end."""

    def __init__(
        self,
        origin: WeightStore,
        neighbours: Neighbours,
        *,
        shelf: Shelf | None = None,
        origin_is_near: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """``shelf``: of a worker with a data port. ``origin_is_near``: on the same disk, relays are then asked last."""
        self._near = origin_is_near
        self._origin = origin
        self._neighbours = neighbours
        self._shelf = shelf
        self._clock = clock or SystemClock()
        self._flights: dict[str, _Flight] = {}
        self._refused: dict[tuple[str, int], float] = {}
        """(sha256, size) → until when."""
        self._counts: Counter[str] = Counter()
        self.url = ""
        """Of the own data port, once it listens."""

    @property
    def region(self) -> str:
        return self._neighbours.region

    def know(self, places: Sequence[RelayPlace]) -> None:
        """Who relays now, as dataflow says."""
        self._neighbours.know(places)

    def metrics(self) -> dict[str, float]:
        """Counters since the start, by metric name."""
        return {name: float(value) for name, value in {**self._counts, **self._neighbours.counts}.items()}

    # ── the store ──

    async def put(self, path: Path, *, may_link: bool = False) -> WeightFile:
        return await self._origin.put(path, may_link=may_link)

    async def has(self, sha256: str) -> bool:
        return await self._origin.has(sha256)

    async def collect(self, keep: Collection[str], *, spare_s: float = 0.0) -> int:
        return await self._origin.collect(keep, spare_s=spare_s)

    async def get(self, file: WeightFile, into: Path) -> None:
        if self._shelf is None:
            await self._fetch(file, into, pull=True)
            return
        if not await asyncio.to_thread(self._shelf.lend, file, into):
            flight = self._flights.get(file.sha256) or self._start(file, self._shelf)
            if flight.file.size_bytes == file.size_bytes:
                await asyncio.shield(flight.task)
                if await asyncio.to_thread(self._shelf.lend, file, into):
                    return
            # Another asked for it with a wrong size, or the shelf is too small.
            await self._fetch(file, into, pull=False)

    async def close(self) -> None:
        """End what is on its way, close the connections."""
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._neighbours.close()

    async def _fetch(self, file: WeightFile, into: Path, *, pull: bool) -> None:
        if not self._near and await self._neighbours.fetch(file, into, near=True, pull=pull):
            return
        began = self._clock.monotonic()
        try:
            await self._origin.get(file, into)
        except Unavailable:
            for near in (True, False) if self._near else (False,):
                if await self._neighbours.fetch(file, into, near=near, pull=False):
                    return
            raise
        self._counts["weights/bytes/origin"] += file.size_bytes
        self._counts["weights/download_s/origin"] += self._clock.monotonic() - began  # type: ignore[assignment]

    # ── the relay ──

    def path(self, sha256: str) -> Path | None:
        """For the data port: where a file lies that others may have."""
        return None if self._shelf is None else self._shelf.path(sha256)

    def pull(self, sha256: str, size_bytes: int) -> int | None:
        """For the data port: see ``wire.blobs.Pull``. A hash that the origin does not know brings nothing here."""
        if self._shelf is None:
            return None
        flight = self._flights.get(sha256)
        if flight is None:
            # The size is the asker's word: a wrong one must cost neither this disk nor those who ask by the right one.
            refused = self._refused.get((sha256, size_bytes), float("-inf"))
            if self._clock.monotonic() < refused or len(self._flights) >= MOST_FLIGHTS or size_bytes > self._room():
                return None
            file = WeightFile(name=f"{sha256}{SUFFIX}", sha256=sha256, size_bytes=size_bytes)
            flight = self._start(file, self._shelf)
        return flight.arrived_bytes()

    def _room(self) -> int:
        return 0 if self._shelf is None else shutil.disk_usage(self._shelf.folder).free

    def _start(self, file: WeightFile, shelf: Shelf) -> _Flight:
        folder = shelf.folder / f"{PART}{file.sha256}.d"
        task = asyncio.create_task(self._fly(file, shelf, folder), name=f"weights {file.sha256[:16]}")
        self._flights[file.sha256] = flight = _Flight(file, folder, task)
        task.add_done_callback(lambda done: self._landed(file, done))
        return flight

    async def _fly(self, file: WeightFile, shelf: Shelf, folder: Path) -> None:
        await asyncio.to_thread(self._clear, shelf, spare=folder)
        await asyncio.to_thread(folder.mkdir, exist_ok=True)
        into = folder / file.name
        await self._fetch(file, into, pull=False)
        await asyncio.to_thread(shelf.add, file, into)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _landed(self, file: WeightFile, task: asyncio.Task[None]) -> None:
        self._flights.pop(file.sha256, None)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        now = self._clock.monotonic()
        self._refused = {asked: until for asked, until in self._refused.items() if until > now}
        self._refused[file.sha256, file.size_bytes] = now + REFUSED_S
        words = str(error) if isinstance(error, AstraFlowError) else f"{type(error).__name__}: {error}"
        log.warning("relay_pull_failed sha256=%s: %s", file.sha256[:16], words)

    def _clear(self, shelf: Shelf, *, spare: Path) -> None:
        """Parts of pulls that failed; those of the same file are gone on with."""
        for path in shelf.folder.glob(f"{PART}*.d"):
            # Looked up each time: another flight may have begun, and made its folder, since this began.
            if path != spare and path.name.removeprefix(PART).removesuffix(".d") not in self._flights:
                shutil.rmtree(path, ignore_errors=True)


class _Flight:
    """A file on its way to the shelf."""

    def __init__(self, file: WeightFile, folder: Path, task: asyncio.Task[None]) -> None:
        self.file, self.folder, self.task = file, folder, task

    def arrived_bytes(self) -> int:
        """Of the part, whoever it comes from."""
        sizes = [0]
        with suppress(FileNotFoundError):
            for path in self.folder.iterdir():
                with suppress(FileNotFoundError):
                    sizes.append(path.stat().st_size)
        return max(sizes)
