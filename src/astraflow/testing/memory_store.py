"""A weight store in memory: what was put survives every process, as a bucket does."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Collection
from pathlib import Path

from astraflow.errors import DigestMismatch, NotFound, Unavailable
from astraflow.types import WeightFile


class MemoryStore:
    """Implements ``weights.store.WeightStore``. ``rng`` None: nothing ever goes wrong and nothing takes time."""

    def __init__(self, *, rng: random.Random | None = None, failures: float = 0.0, slowest_s: float = 0.0) -> None:
        """``failures``: chance of each transfer to break; a broken one leaves nothing behind."""
        self.files: dict[str, bytes] = {}
        self.failures = failures
        self.broken = 0
        self._random = rng
        self._slowest_s = slowest_s

    async def put(self, path: Path, *, may_link: bool = False) -> WeightFile:
        data = await asyncio.to_thread(path.read_bytes)
        await self._transfer(Unavailable("the store did not answer"))
        sha256 = hashlib.sha256(data).hexdigest()
        self.files[sha256] = data
        return WeightFile(name=path.name, sha256=sha256, size_bytes=len(data))

    async def get(self, file: WeightFile, into: Path) -> None:
        if file.sha256 not in self.files:
            raise NotFound(f"{file.name} (sha256 {file.sha256[:16]}) is not in the store")
        await self._transfer(DigestMismatch(f"{file.name} arrived damaged"))
        await asyncio.to_thread(into.write_bytes, self.files[file.sha256])

    async def has(self, sha256: str) -> bool:
        return sha256 in self.files

    async def collect(self, keep: Collection[str], *, spare_s: float = 0.0) -> int:
        unwanted = set(self.files) - set(keep)
        for sha256 in unwanted:
            del self.files[sha256]
        return len(unwanted)

    async def _transfer(self, error: Exception) -> None:
        if self._random is None:
            return
        await asyncio.sleep(self._random.uniform(0.0, self._slowest_s))
        if self._random.random() < self.failures:
            self.broken += 1
            raise error
