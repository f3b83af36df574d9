"""A worker's verified weight files, one folder per digest. Downloads only what is not here under any name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from astraflow.errors import ConfigError, DigestMismatch, NotFound, WeightsRefused
from astraflow.types import Manifest, WeightFile
from astraflow.weights.digest import digest_files
from astraflow.weights.manifest import weight_files_in
from astraflow.weights.store import WeightStore
from astraflow.wire.names import require_manifest, require_sha256
from astraflow.wire.transfer import verify


class Cache:
    """Of one policy. Local model folders count as cached when their digest is the one wanted."""

    def __init__(self, store: WeightStore, folder: Path, *, local: Sequence[Path] = (), keep: int = 2) -> None:
        self._store = store
        self._folder = folder
        self._local = list(local)
        self._local_files: dict[str, list[Path]] | None = None
        self._recent: list[str] = []
        self._known: dict[str, Path] = {}
        self._keep = keep
        self.downloaded_bytes = 0
        folder.mkdir(parents=True, exist_ok=True)

    async def fetch(self, manifest: Manifest) -> list[Path]:
        """The manifest's files, verified: each by SHA-256, full weights together by the digest of their tensors.

        Raises NotFound, Unavailable, DigestMismatch, StorageFull.
        """
        require_manifest(manifest)
        require_sha256(manifest.digest, "Manifest.digest")
        local = await asyncio.to_thread(self._in_local_folders, manifest)
        if local:
            return local
        place = self._folder / manifest.digest
        await asyncio.to_thread(place.mkdir, parents=True, exist_ok=True)
        for file in manifest.files:
            if not await asyncio.to_thread(self._reuse, file, place):
                await self._store.get(file, place / file.name)
                self.downloaded_bytes += file.size_bytes
        files = [place / file.name for file in manifest.files]
        await asyncio.to_thread(_require_digest, manifest, files)
        self._known |= {file.sha256: place / file.name for file in manifest.files}
        return files

    async def forget(self, manifest: Manifest) -> None:
        """Drop what is cached of a version: something in it was wrong."""
        await asyncio.to_thread(shutil.rmtree, self._folder / manifest.digest, ignore_errors=True)

    async def trim(self, manifest: Manifest) -> None:
        """Note that a version was loaded and delete all but the newest ``keep``."""
        self._recent = [d for d in self._recent if d != manifest.digest] + [manifest.digest]
        self._recent = self._recent[-self._keep :]
        await asyncio.to_thread(self._delete_others, frozenset(self._recent))

    def _in_local_folders(self, manifest: Manifest) -> list[Path]:
        if self._local_files is None:
            self._local_files = {}
            for folder in self._local:
                # A folder that is missing or broken is not a copy; then the store is asked.
                with contextlib.suppress(ConfigError, WeightsRefused):
                    files = weight_files_in(folder)
                    self._local_files[digest_files(files)] = files
        return self._local_files.get(manifest.digest, []) if manifest.base_digest is None else []

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


def _require_digest(manifest: Manifest, files: list[Path]) -> None:
    if manifest.base_digest is not None:
        return
    found = digest_files(files)
    if found != manifest.digest:
        raise DigestMismatch(
            f"version {manifest.version} of {manifest.policy} should have digest {manifest.digest[:16]}, "
            f"its files have {found[:16]}"
        )
