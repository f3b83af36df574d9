"""A worker's verified weight files, one folder per digest. Downloads only what is not here under any name.

    manifest ─► plan_path(held, manifest) ─► full files ─────────────────────────────┐
                                         └─► deltas ─► rebuild on a held version ─► digest ─► files

A way by deltas that does not lead to the manifest's digest is given up, loudly, for the next one: at last full weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from astraflow.errors import AstraFlowError, ConfigError, DigestMismatch, NotFound, WeightsRefused
from astraflow.types import Manifest, WeightFile
from astraflow.weights.digest import digest_files
from astraflow.weights.manifest import weight_files_in
from astraflow.weights.plan import Plan, plan_path
from astraflow.weights.rebuild import rebuild
from astraflow.weights.store import WeightStore
from astraflow.wire.names import require_manifest, require_sha256
from astraflow.wire.transfer import verify

log = logging.getLogger("astraflow.weights")
DELTAS = "deltas"


class Cache:
    """Of one policy. Local model folders count as cached when their digest is the one wanted."""

    def __init__(self, store: WeightStore, folder: Path, *, local: Sequence[Path] = (), keep: int = 2) -> None:
        self._store = store
        self._folder = folder
        self._local = list(local)
        self._local_files: dict[str, list[Path]] | None = None
        self._recent: list[str] = []
        self._known: dict[str, Path] = {}
        self._held: dict[str, list[Path]] = {}
        """Full weights that are here and were verified, by digest: a delta may start from them."""
        self._keep = keep
        self._gone: set[str] = set()
        """Deltas that were not in the store when the version that is being fetched needed them."""
        self._in_use: Counter[str] = Counter()
        self._lock = asyncio.Lock()
        self.downloaded_bytes = 0
        self.decode_s = 0.0
        """In which deltas were made into weights."""
        self.counts = {"full": 0, "delta": 0, "fallback": 0}
        """How versions came; and how often a way by deltas failed."""
        folder.mkdir(parents=True, exist_ok=True)

    async def fetch(self, manifest: Manifest) -> list[Path]:
        """The manifest's files, verified: each by SHA-256, full weights together by the digest of their tensors.

        Raises NotFound, Unavailable, DigestMismatch, WeightsRefused, StorageFull.
        """
        require_manifest(manifest)
        require_sha256(manifest.digest, "Manifest.digest")
        async with self._lock:
            if manifest.base_digest is not None:
                return await self._download(manifest)
            await asyncio.to_thread(self._look_in_local_folders)
            return await self._fetch(manifest)

    async def _fetch(self, manifest: Manifest) -> list[Path]:
        """By the cheapest way that leads there."""
        self._gone.clear()
        failed: set[str] = set()
        error: AstraFlowError | OSError | None = None
        while (plan := plan_path(self._at_hand(), manifest, without=failed)) is not None:
            try:
                return await self._walk(plan, manifest)
            except (NotFound, DigestMismatch, WeightsRefused, FileNotFoundError) as wrong:
                if plan.full and not plan.deltas:
                    raise
                error = wrong
                self.counts["fallback"] += 1
                gone = self._gone & {delta.file.sha256 for delta in plan.deltas} - failed
                if gone:
                    failed |= gone  # a way around may begin at the same weights
                elif plan.full:
                    failed |= {delta.file.sha256 for delta in plan.deltas}
                else:
                    self._let_go(plan.start)
                log.warning(
                    "weights_delta_failed policy=%s version=%d deltas=%d: %s; trying %s",
                    manifest.policy, manifest.version, len(plan.deltas), wrong,
                    "other weights" if plan.full else "from full weights",
                )  # fmt: skip
        raise self._no_way(manifest, error)

    def _no_way(self, manifest: Manifest, error: AstraFlowError | OSError | None) -> AstraFlowError | OSError:
        if error is not None and not isinstance(error, NotFound):
            return error
        return NotFound(
            f"no way leads to version {manifest.version} of {manifest.policy}, neither from the {len(self._held)} that "
            f"are held nor from the last that was published in full ({error or 'it names none'}): the next one that "
            "is published in full can be had"
        )

    async def _walk(self, plan: Plan, manifest: Manifest) -> list[Path]:
        if plan.full:
            anchor = msgspec.structs.replace(manifest, digest=plan.start, files_digest="", deltas=())
            base = await self._download(anchor)
        else:
            base = self._at_hand()[plan.start]
        if not plan.deltas:
            if not plan.full:
                await asyncio.to_thread(_require_digest, manifest, base)
            self.counts["full"] += plan.full
            return base
        files = await self._apply(plan, manifest, base)
        self.counts["delta"] += 1
        return files

    async def _apply(self, plan: Plan, manifest: Manifest, base: list[Path]) -> list[Path]:
        """The deltas in a row on ``base``. What of them has been pulled is kept if the rest cannot be had now."""
        place, pulled = self._folder / manifest.digest, self._folder / DELTAS
        for folder in (place, pulled):
            await asyncio.to_thread(folder.mkdir, exist_ok=True)
        paths = []
        for delta in plan.deltas:
            path = pulled / f"{delta.file.sha256}.safetensors"
            if not await asyncio.to_thread(path.is_file):
                try:
                    await self._store.get(delta.file, path)
                except NotFound:
                    self._gone.add(delta.file.sha256)
                    raise
                self.downloaded_bytes += delta.file.size_bytes
            paths.append(path)
        began = time.monotonic()
        try:
            files = await asyncio.to_thread(rebuild, base, paths, place)
            await asyncio.to_thread(_require_digest, manifest, files)
        except (DigestMismatch, WeightsRefused, OSError):
            await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)
            raise
        finally:
            self.decode_s += time.monotonic() - began
            await asyncio.to_thread(shutil.rmtree, pulled, ignore_errors=True)
        self._held[manifest.digest] = files
        return files

    async def _download(self, manifest: Manifest) -> list[Path]:
        """Full weights, or an adapter, file by file."""
        place = self._folder / manifest.digest
        await asyncio.to_thread(place.mkdir, parents=True, exist_ok=True)
        for file in manifest.files:
            if not await asyncio.to_thread(self._reuse, file, place):
                await self._store.get(file, place / file.name)
                self.downloaded_bytes += file.size_bytes
        files = [place / file.name for file in manifest.files]
        await asyncio.to_thread(_require_digest, manifest, files)
        self._known |= {file.sha256: place / file.name for file in manifest.files}
        if manifest.base_digest is None:
            self._held[manifest.digest] = files
        return files

    @contextlib.contextmanager
    def kept(self, manifest: Manifest) -> Iterator[None]:
        """Its files are not trimmed meanwhile: from before they are fetched until they are read."""
        self._in_use[manifest.digest] += 1
        try:
            yield
        finally:
            self._in_use[manifest.digest] -= 1
            self._in_use += Counter()  # forget those that nobody uses

    async def forget(self, manifest: Manifest) -> None:
        """Drop what is cached of a version: something in it was wrong."""
        async with self._lock:
            self._let_go(manifest.digest)
            await asyncio.to_thread(shutil.rmtree, self._folder / manifest.digest, ignore_errors=True)

    async def trim(self, manifest: Manifest) -> None:
        """Note that a version was loaded and delete all but the newest ``keep`` and what is in use."""
        async with self._lock:
            self._recent = [d for d in self._recent if d != manifest.digest] + [manifest.digest]
            self._recent = self._recent[-self._keep :]
            await asyncio.to_thread(self._delete_others, frozenset(self._recent) | self._in_use.keys())

    def _at_hand(self) -> dict[str, list[Path]]:
        return {**self._held, **(self._local_files or {})}

    def _let_go(self, digest: str) -> None:
        """These files are not what they were: the store is asked again."""
        self._held.pop(digest, None)
        if self._local_files:
            self._local_files.pop(digest, None)

    def _look_in_local_folders(self) -> None:
        if self._local_files is not None:
            return
        self._local_files = {}
        for folder in self._local:
            # A folder that is missing or broken is not a copy; then the store is asked.
            with contextlib.suppress(ConfigError, WeightsRefused):
                files = weight_files_in(folder)
                self._local_files[digest_files(files)] = files

    def _reuse(self, file: WeightFile, place: Path) -> bool:
        """Whether the file is here: under its name, or as a part of another version that this process verified."""
        target = place / file.name
        other = self._known.get(file.sha256)
        try:
            if not target.is_file() and other is not None:
                os.link(other, target)
            verify(target, file)
        except (OSError, NotFound, DigestMismatch):  # not here, or not what it was: the store is asked
            return False
        return True

    def _delete_others(self, keep: frozenset[str]) -> None:
        for path in self._folder.iterdir():
            if path.is_dir() and path.name not in keep:
                shutil.rmtree(path, ignore_errors=True)
        self._known = {sha256: path for sha256, path in self._known.items() if path.parent.name in keep}
        self._held = {digest: files for digest, files in self._held.items() if digest in keep}


def _require_digest(manifest: Manifest, files: list[Path]) -> None:
    if manifest.base_digest is not None:
        return
    found = digest_files(files)
    if found != manifest.digest:
        raise DigestMismatch(
            f"version {manifest.version} of {manifest.policy} should have digest {manifest.digest[:16]}, "
            f"its files have {found[:16]}"
        )
