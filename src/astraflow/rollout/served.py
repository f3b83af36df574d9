"""One policy on this worker: its engine and the subscriber that keeps the engine's weights current."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

from astraflow.engines.base import Engine
from astraflow.errors import AstraFlowError, EngineFailed
from astraflow.rollout.activity import Activity, Trouble
from astraflow.types import Manifest
from astraflow.wire.messages import ManifestRequest, RelayPlace
from astraflow.wire.protocol import Dataflow

LONGEST_PAUSE = "weights/longest_pause_s"
Load = Callable[[Manifest, Sequence[Path]], Awaitable[None]]


class Files(Protocol):
    async def fetch(self, manifest: Manifest) -> Sequence[Path]:
        """Verified files of a version, on this machine's disk."""

    def kept(self, manifest: Manifest) -> AbstractContextManager[None]:
        """Meanwhile they stay there."""


class Follower(Protocol):
    """What is used of ``weights.subscribe.Subscriber``."""

    @property
    def cache(self) -> Files: ...

    @property
    def pulling(self) -> int | None:
        """Serial of the version whose files are being fetched."""

    @property
    def loaded(self) -> Manifest | None: ...

    @property
    def wanted(self) -> Manifest | None:
        """The newest that was offered."""

    @property
    def error(self) -> str | None:
        """Why the newest attempt to load failed; None once one succeeded."""

    def offer(self, manifest: Manifest) -> None: ...

    def metrics(self) -> dict[str, float]:
        """Counters for the report."""

    async def until_loaded(self, serial: int, *, deadline_s: float) -> Manifest: ...

    async def run(self) -> None: ...


class Relay(Protocol):
    """What is used of ``weights.relay.RelayStore``."""

    @property
    def region(self) -> str: ...

    @property
    def url(self) -> str:
        """Of the own data port; empty: there is none."""

    def know(self, places: Sequence[RelayPlace]) -> None:
        """The data ports of others."""

    def metrics(self) -> dict[str, float]:
        """Counters of the report."""


class ServedPolicy:
    """``follow`` makes the subscriber, given what loads: ``lambda load: Subscriber(policy, store, cache, load)``."""

    def __init__(
        self,
        policy: str,
        engine: Engine,
        follow: Callable[[Load], Follower],
        *,
        pin_wait_s: float = 600.0,
        max_staleness: int | None = None,
    ) -> None:
        """Where the engine has room for one version only, an update waits, at most ``pin_wait_s``, for the leases
        that are pinned to the version that it would replace. ``max_staleness``: how many versions behind, what is
        sampled may still be trained; None: nothing is trained, any version will do."""
        self.policy = policy
        self.engine = engine
        self.subscriber = follow(self._load)
        self._pin_wait_s = pin_wait_s
        self._max_staleness = max_staleness
        self._pins: Counter[int] = Counter()
        self._unpinned = asyncio.Event()
        self._loading = asyncio.Lock()
        self.load_s = 0.0
        """Seconds in which the engine took weights: read, verified and made its own, beside the decoding."""

    @contextmanager
    def pinned(self, version: int) -> Iterator[None]:
        """While a lease that names this version is played."""
        self._pins[version] += 1
        try:
            yield
        finally:
            self._pins[version] -= 1
            self._pins += Counter()  # forget versions without a pin
            self._unpinned.set()

    async def hold(self, version: int, dataflow: Dataflow, *, deadline_s: float) -> None:
        """Make the engine hold a version. Raises EngineFailed if it cannot be had here."""
        try:
            manifest = await dataflow.manifest(ManifestRequest(policy=self.policy, version=version))
            if self._holds(manifest):
                return
            loaded = self.subscriber.loaded
            if loaded is None or loaded.serial < manifest.serial:
                self.subscriber.offer(manifest)
                await self.subscriber.until_loaded(manifest.serial, deadline_s=deadline_s)
            if not self._holds(manifest) and self.engine.info().versions_held > 1:
                with self.subscriber.cache.kept(manifest):  # the newest may be loaded, and the cache trimmed, meanwhile
                    await self._load(manifest, await self.subscriber.cache.fetch(manifest))
        except (AstraFlowError, OSError) as error:
            raise EngineFailed(f"{self.policy}: version {version} cannot be loaded here: {error}") from error
        if not self._holds(manifest):
            info = self.engine.info()
            raise EngineFailed(
                f"{self.policy}: version {version} is not held; the engine has room for {info.versions_held} "
                f"and holds {list(info.versions)}"
            )

    def trouble(self) -> Trouble | None:
        """The newest version could not be loaded. It goes on with the one that it holds, within the bound (F77)."""
        wanted, loaded, error = self.subscriber.wanted, self.subscriber.loaded, self.subscriber.error
        if wanted is None or error is None:
            return None
        behind = 0 if loaded is None else wanted.version - loaded.version
        # What it took instead may have been found to be wrong: it then holds neither.
        lost = loaded is not None and self.engine.info().digests.get(loaded.version) != loaded.digest
        out = loaded is None or lost or (self._max_staleness is not None and behind > self._max_staleness)
        return Trouble(why=error, out=out)

    async def until_fit(self, *, deadline_s: float) -> None:
        """Until it may serve: the engine holds a version that is not too old. TimedOut says why it does not."""
        trouble, loaded = self.trouble(), self.subscriber.loaded
        out = trouble is not None and trouble.out
        serial = loaded.serial + 1 if loaded is not None and out else 0
        await self.subscriber.until_loaded(serial, deadline_s=deadline_s)

    def _holds(self, manifest: Manifest) -> bool:
        """By digest: after a rollback another version has the same number."""
        return self.engine.info().digests.get(manifest.version) == manifest.digest

    async def _load(self, manifest: Manifest, files: Sequence[Path]) -> None:
        """One at a time: the newest and a pinned version must not race for the same room."""
        async with self._loading:
            if self.engine.info().versions_held == 1:
                await self._until_unpinned(manifest)
            if not self._holds(manifest):
                began = asyncio.get_running_loop().time()
                await self.engine.load(manifest, list(files))
                self.load_s += asyncio.get_running_loop().time() - began

    async def _until_unpinned(self, manifest: Manifest) -> None:
        """A bounded wait: after it the update is loaded all the same, and pinned requests fail by name."""
        try:
            async with asyncio.timeout(self._pin_wait_s):
                while any(held != manifest.digest for held in self._pinned_digests()):
                    self._unpinned.clear()
                    await self._unpinned.wait()
        except TimeoutError:
            return

    def _pinned_digests(self) -> list[str]:
        """Of the weights in the engine that a lease names."""
        held = self.engine.info().digests
        return [held[version] for version in self._pins if version in held]


@runtime_checkable
class Counts(Protocol):
    """What an engine may offer beside."""

    def metrics(self) -> dict[str, float]:
        """Of how it took weights, for the report."""


def watch_weights(activity: Activity, policies: Mapping[str, ServedPolicy]) -> None:
    """From now on the worker's report says what is being fetched, how weights came, and which cannot be loaded."""
    activity.pulling = lambda: _pulling(policies)
    activity.weights = lambda: _metrics(policies)
    activity.trouble = lambda: worst_trouble(policies)


def worst_trouble(policies: Mapping[str, ServedPolicy]) -> Trouble | None:
    """One that keeps the worker from serving, else any."""
    troubles = [trouble for policy in policies.values() if (trouble := policy.trouble()) is not None]
    return next((each for each in troubles if each.out), troubles[0] if troubles else None)


def _pulling(policies: Mapping[str, ServedPolicy]) -> dict[str, int]:
    """Serial per policy whose weights are being fetched now."""
    serials = {name: policy.subscriber.pulling for name, policy in policies.items()}
    return {name: serial for name, serial in serials.items() if serial is not None}


def _metrics(policies: Mapping[str, ServedPolicy]) -> dict[str, float]:
    """How weights came, of all policies together."""
    found: dict[str, float] = {}
    for policy in policies.values():
        own = policy.engine.metrics() if isinstance(policy.engine, Counts) else {}
        load_s = policy.load_s - own.get("weights/attest_s", 0.0)
        for name, value in {**policy.subscriber.metrics(), **own, "weights/load_s": load_s}.items():
            before = found.get(name, 0.0)
            found[name] = max(before, value) if name == LONGEST_PAUSE else before + value
    return found
