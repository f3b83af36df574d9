"""One policy on this worker: its engine and the subscriber that keeps the engine's weights current."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from astraflow.engines.base import Engine
from astraflow.errors import AstraFlowError, EngineFailed, NotFound
from astraflow.types import Manifest
from astraflow.wire.messages import ManifestRequest
from astraflow.wire.protocol import Dataflow

Load = Callable[[Manifest, Sequence[Path]], Awaitable[None]]


class Files(Protocol):
    async def fetch(self, manifest: Manifest) -> Sequence[Path]:
        """Verified files of a version, on this machine's disk."""


class Follower(Protocol):
    """What is used of ``weights.subscribe.Subscriber``."""

    @property
    def cache(self) -> Files: ...

    @property
    def loaded(self) -> Manifest | None: ...

    @property
    def error(self) -> str | None: ...

    @property
    def counts(self) -> Mapping[str, int]: ...

    def offer(self, manifest: Manifest) -> None: ...

    async def until_loaded(self, serial: int, *, deadline_s: float) -> Manifest: ...

    async def run(self) -> None: ...


class ServedPolicy:
    """``follow`` makes the subscriber, given what loads: ``lambda load: Subscriber(policy, store, cache, load)``."""

    def __init__(self, policy: str, engine: Engine, follow: Callable[[Load], Follower]) -> None:
        self.policy = policy
        self.engine = engine
        self.subscriber = follow(self._load)
        self._loading = asyncio.Lock()

    async def hold(self, version: int, dataflow: Dataflow) -> None:
        """Make the engine hold a past version beside the newest. Raises EngineFailed if it cannot be had."""
        if version in self.engine.info().versions:
            return
        try:
            manifest = await dataflow.manifest(ManifestRequest(policy=self.policy, version=version))
            await self._load(manifest, await self.subscriber.cache.fetch(manifest))
        except (AstraFlowError, OSError) as error:
            raise EngineFailed(f"{self.policy}: version {version} cannot be loaded here: {error}") from error
        if version not in self.engine.info().versions:
            held = list(self.engine.info().versions)
            raise EngineFailed(f"{self.policy}: version {version} was loaded but is not held; held: {held}")

    async def _load(self, manifest: Manifest, files: Sequence[Path]) -> None:
        """One at a time: the newest and a pinned version must not race for the same room."""
        async with self._loading:
            await self.engine.load(manifest, list(files))


def served(policies: Mapping[str, ServedPolicy], policy: str) -> ServedPolicy:
    """Raises NotFound with the policies that this worker has."""
    if policy not in policies:
        raise NotFound(f"this worker does not serve policy {policy!r}; it serves {sorted(policies)}")
    return policies[policy]
