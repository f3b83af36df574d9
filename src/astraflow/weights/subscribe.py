"""How a rollout service follows a policy's weights: offered manifests in, loaded versions out. Off the decode path.

    offer(manifest) ─► newest serial ─► files or deltas to cache ─► SHA-256, digest ─► load(manifest, files) ─► loaded

A pull that has begun is finished, whatever is published meanwhile; then comes the newest, what lay between is skipped.
A failure keeps what is loaded, is counted and told, and is tried again with back-off or at the next offer (F77).
``loaded`` moves only after ``load`` has returned: the label comes from what is in the engine (F56).
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from astraflow.errors import AstraFlowError, DigestMismatch, NotFound, TimedOut, Unattested
from astraflow.observe.waits import Wait
from astraflow.types import Manifest
from astraflow.weights.cache import Cache
from astraflow.weights.store import WeightStore

log = logging.getLogger("astraflow.weights")

Load = Callable[[Manifest, Sequence[Path]], Awaitable[None]]
"""Make the engine hold these weights; the files are verified and read-only. Raises if it does not hold them."""


class Subscriber:
    """Follows one policy. ``run`` belongs in the service's task group; ``offer`` may be called at any time there."""

    def __init__(
        self,
        policy: str,
        store: WeightStore,
        cache: Path,
        load: Load,
        *,
        local: Sequence[Path] = (),
        keep: int = 2,
        first_s: float = 0.5,
        most_s: float = 30.0,
        seed: int = 0,
    ) -> None:
        """``local``: model folders that may already hold a wanted version. ``keep``: versions left in the cache."""
        self.policy = policy
        self.cache = Cache(store, cache, local=local, keep=keep)
        self._load = load
        self._first_s, self._most_s = first_s, most_s
        self._rng = random.Random(seed)
        self._wanted: Manifest | None = None
        self._moved = asyncio.Condition()
        self._offered = asyncio.Event()
        self.loaded: Manifest | None = None
        """What the engine holds."""
        self.error: str | None = None
        """Why the newest attempt failed, ``digest mismatch at v14 of solver: ...``; None once one succeeded."""
        self.pulling: int | None = None
        """Serial of the version whose files are being fetched."""
        self.counts = {"loads": 0, "failures": 0, "superseded": 0}

    def metrics(self) -> dict[str, float]:
        """Counters for the report."""
        counts = {**self.cache.counts, "failures": self.counts["failures"], "bytes": self.cache.downloaded_bytes}
        found = {f"weights/{name}": float(count) for name, count in counts.items()}
        return {**found, "weights/decode_s": self.cache.decode_s}

    @property
    def wanted(self) -> Manifest | None:
        """The newest that was offered."""
        return self._wanted

    def offer(self, manifest: Manifest) -> None:
        """Tell of a manifest that dataflow has announced; only one with a newer serial changes anything."""
        if manifest.policy != self.policy:
            raise ValueError(f"a manifest of {manifest.policy} was offered to the subscriber of {self.policy}")
        if self._wanted is None or manifest.serial > self._wanted.serial:
            if self._wanted is not None and self._wanted is not self.loaded:
                self.counts["superseded"] += 1
            self._wanted = manifest
            self._offered.set()

    async def until_loaded(self, serial: int, *, deadline_s: float) -> Manifest:
        """The loaded manifest once its serial is at least ``serial``. TimedOut says what the last attempt failed of."""
        try:
            async with asyncio.timeout(deadline_s), self._moved:
                await self._moved.wait_for(lambda: self.loaded is not None and self.loaded.serial >= serial)
        except TimeoutError as error:
            raise TimedOut(
                f"{Wait.WEIGHTS}: serial {serial} of {self.policy} was not loaded within {deadline_s:g} s "
                f"(last failure: {self.error or 'none'})"
            ) from error
        assert self.loaded is not None
        return self.loaded

    async def run(self) -> None:
        """Follow until cancelled. Idle between offers; ends by itself never."""
        failures = 0
        while True:
            await self._offered.wait()
            while (manifest := self._next()) is not None:
                failures = 0 if await self._take(manifest) else failures + 1
                if failures and self._wanted is manifest:
                    await self._pause(failures)

    def _next(self) -> Manifest | None:
        self._offered.clear()  # it is read here: one that came during the last take would end every pause at once
        wanted, loaded = self._wanted, self.loaded
        return None if wanted is None or (loaded is not None and loaded.serial >= wanted.serial) else wanted

    async def _take(self, manifest: Manifest) -> bool:
        try:
            self.pulling = manifest.serial
            files = await self.cache.fetch(manifest)
            await self._load(manifest, files)
        except NotFound as error:
            if self._wanted is not manifest:
                return False  # deleted because it is old: the newest comes next
            self._failed(manifest, error)
            return False
        except DigestMismatch as error:
            await self.cache.forget(manifest)
            self._failed(manifest, error)
            return False
        except Exception as error:  # noqa: BLE001 - whatever an engine or a disk raises: the old version goes on serving
            self._failed(manifest, error)
            return False
        finally:
            self.pulling = None
        async with self._moved:
            self.loaded, self.error = manifest, None
            self.counts["loads"] += 1
            self._moved.notify_all()
        await self.cache.trim(manifest)
        return True

    def _failed(self, manifest: Manifest, error: Exception) -> None:
        self.counts["failures"] += 1
        kind, words = _named(error)
        self.error = f"{kind} at v{manifest.version} of {self.policy}: {words}"
        log.warning("weights_failed policy=%s version=%d: %s: %s", self.policy, manifest.version, kind, words)

    async def _pause(self, failures: int) -> None:
        """Back-off before the same version again; a newer offer ends it."""
        seconds = min(self._most_s, self._first_s * 2.0 ** min(failures - 1, 30)) * self._rng.uniform(0.5, 1.0)
        try:
            async with asyncio.timeout(seconds):
                await self._offered.wait()
        except TimeoutError:
            return


def _named(error: Exception) -> tuple[str, str]:
    """``DigestMismatch`` → ``digest mismatch``, a diagnosis → itself; what a disk raises is named in its words."""
    if isinstance(error, Unattested):
        diagnosis, _, seen = str(error).partition(": ")
        return diagnosis, seen
    if isinstance(error, AstraFlowError):
        return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(error).__name__).lower(), str(error)
    return "load failed", f"{type(error).__name__}: {error}"
