"""Where weight files live, by SHA-256: a folder (``DirStore``), or dataflow's folder over HTTP (``HttpStore``).

Files are immutable. A file is visible under its hash only when all of it is on disk: a torn write is never seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from astraflow.clock import Clock, SystemClock
from astraflow.disk import is_full
from astraflow.errors import DigestMismatch, NotFound, StorageFull
from astraflow.types import WeightFile
from astraflow.wire.names import require_name, require_sha256
from astraflow.wire.transfer import Transfer, sha256_of, verify

SUFFIX = ".safetensors"
PART = ".part-"
CHUNK_BYTES = 4 << 20
ABANDONED_S = 3600.0
"""A file on its way in that nobody has written to for so long is nobody's."""


class WeightStore(Protocol):
    """Immutable files by content. ``astraflow.testing.check_store`` is the test of an implementation."""

    async def put(self, path: Path, *, may_link: bool = False) -> WeightFile:
        """Store a file under its hash. Again makes it as if stored now, for ``collect``. ``may_link``: the caller will
        never write to it again, so that a store on the same disk need not copy. Raises StorageFull."""

    async def get(self, file: WeightFile, into: Path) -> None:
        """Make ``into`` a verified copy (or link: never write to it). Raises NotFound, DigestMismatch, Unavailable;
        ``into`` then does not exist."""

    async def has(self, sha256: str) -> bool:
        """Whether the file is here, whole."""

    async def collect(self, keep: Collection[str], *, spare_s: float = 0.0) -> int:
        """Delete what is not in ``keep``; returns how many files. A store owned by someone else deletes nothing.

        ``spare_s``: nor what was first seen unwanted within so long; a version is being stored piece by piece.
        """


class DirStore:
    """A folder; any process that has its path shares it. Also what ``wire.server`` serves (``wire.blobs.Blobs``)."""

    def __init__(self, folder: Path, *, grace_s: float = 30.0, clock: Clock | None = None) -> None:
        """``grace_s``: ``collect`` spares what nobody wanted for less than that: its manifest may not be committed yet.
        Counted from when it was first seen so, on this process's own clock: what a file's date says may be wrong."""
        self.folder = folder
        self._grace_s = grace_s
        self._clock = clock or SystemClock()
        self._unwanted: dict[tuple[str, int], float] = {}
        """(name, date as a mere mark: a file that was put again has another) → since when."""
        folder.mkdir(parents=True, exist_ok=True)

    async def put(self, path: Path, *, may_link: bool = False) -> WeightFile:
        return await asyncio.to_thread(self.put_blocking, path, may_link=may_link)

    async def get(self, file: WeightFile, into: Path) -> None:
        await asyncio.to_thread(self._get, file, into)

    async def has(self, sha256: str) -> bool:
        return await asyncio.to_thread(self.path, sha256) is not None

    async def collect(self, keep: Collection[str], *, spare_s: float = 0.0) -> int:
        return await asyncio.to_thread(self._collect, frozenset(keep), self._grace_s + spare_s)

    def path(self, sha256: str) -> Path | None:
        """Where a file lies, if it is here."""
        path = self._place(sha256)
        return path if path.is_file() else None

    def incoming(self, sha256: str) -> IncomingFile:
        """Receive a file piece by piece."""
        return IncomingFile(self.folder, self._place(sha256), sha256)

    def refresh(self, sha256: str) -> bool:
        """Whether the file is here. It is then young: ``collect`` spares it until its new manifest is committed."""
        try:
            os.utime(self._place(sha256))
        except FileNotFoundError:
            return False
        return True

    def put_blocking(self, path: Path, *, may_link: bool = False) -> WeightFile:
        """``put`` for a caller without an event loop."""
        file = weight_file_of(path)
        place = self._place(file.sha256)
        if self.refresh(file.sha256):
            return file
        if may_link and self._link_in(path, place):
            return file
        incoming = self.incoming(file.sha256)
        try:
            with path.open("rb") as source:
                while chunk := source.read(CHUNK_BYTES):
                    incoming.write(chunk)
            incoming.commit()
        finally:
            incoming.abort()
        return file

    def _link_in(self, path: Path, place: Path) -> bool:
        part = self.folder / f"{PART}{secrets.token_hex(8)}"
        try:
            os.link(path, part)
        except OSError:  # another disk, or a file system without links: the caller copies
            return False
        path.chmod(0o444)
        os.utime(part)
        _sync(part)
        part.replace(place)
        part.unlink(missing_ok=True)
        _sync(self.folder)
        return True

    def _get(self, file: WeightFile, into: Path) -> None:
        part = into.with_name(f"{PART}{secrets.token_hex(8)}")
        try:
            with _disk_errors():
                _link_or_copy(self._place(file.sha256), part, file)
                verify(part, file)
                part.replace(into)
        except DigestMismatch:
            # What rotted here must not stay: the next put of the same content writes it anew. Who asked for a wrong
            # size is wrong himself: nothing is taken from others.
            with contextlib.suppress(NotFound):
                if sha256_of(self._place(file.sha256)) != file.sha256:
                    self._place(file.sha256).unlink(missing_ok=True)
            into.unlink(missing_ok=True)
            raise
        finally:
            part.unlink(missing_ok=True)

    def _collect(self, keep: frozenset[str], grace_s: float) -> int:
        now = self._clock.monotonic()
        seen, self._unwanted = self._unwanted, {}
        removed = 0
        for path in self.folder.iterdir():
            part = path.name.startswith(PART)
            if not part and (path.suffix != SUFFIX or path.stem in keep):
                continue
            mark = (path.name, _date(path))
            since = seen.get(mark, now)
            if now - since >= grace_s + (ABANDONED_S if part else 0.0):
                removed += self._remove(path, mark[1]) and not part
            else:
                self._unwanted[mark] = since
        return removed

    def _remove(self, path: Path, date: int) -> bool:
        """Delete a file unless it was put again since its date was read. Out of sight first: who puts it now either
        was seen by the date, or finds it gone and writes it anew."""
        aside = self.folder / f"{PART}{secrets.token_hex(8)}"
        try:
            path.replace(aside)
        except FileNotFoundError:
            return False
        if _date(aside) != date:
            aside.replace(path)
            return False
        aside.unlink(missing_ok=True)
        return True

    def _place(self, sha256: str) -> Path:
        return self.folder / f"{require_sha256(sha256, 'sha256')}{SUFFIX}"


class IncomingFile:
    """A file on its way into a folder: hashed as it comes, renamed when it is whole and right."""

    def __init__(self, folder: Path, place: Path, sha256: str) -> None:
        self._place = place
        self._sha256 = sha256
        self._hash = hashlib.sha256()
        self._part = folder / f"{PART}{secrets.token_hex(8)}"
        with _disk_errors():
            self._file: BinaryIO = self._part.open("xb")

    def write(self, chunk: bytes) -> None:
        self._hash.update(chunk)
        with _disk_errors():
            self._file.write(chunk)

    def commit(self) -> None:
        found = self._hash.hexdigest()
        if found != self._sha256:
            self.abort()
            raise DigestMismatch(f"a file announced as sha256 {self._sha256[:16]} arrived as {found[:16]}")
        with _disk_errors():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._part.chmod(0o444)
            self._part.replace(self._place)
            _sync(self._place.parent)

    def abort(self) -> None:
        with contextlib.suppress(OSError):  # closing flushes, which a full disk refuses; the file goes away anyway
            self._file.close()
        self._part.unlink(missing_ok=True)


class HttpStore:
    """Dataflow's store from elsewhere; ``HttpDataflow.weights`` is its connection."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer

    async def put(self, path: Path, *, may_link: bool = False) -> WeightFile:
        file = await asyncio.to_thread(weight_file_of, path)
        await self._transfer.upload(path, file)
        return file

    async def get(self, file: WeightFile, into: Path) -> None:
        # One name per content: a pull that was broken off goes on with what it had, in this process or the next.
        part = into.with_name(f"{PART}{require_sha256(file.sha256, 'sha256')}")
        await self._transfer.download(file, part)
        part.replace(into)

    async def has(self, sha256: str) -> bool:
        return await self._transfer.has(sha256)

    async def collect(self, keep: Collection[str], *, spare_s: float = 0.0) -> int:
        return 0


def weight_file_of(path: Path) -> WeightFile:
    """Name, hash and size of one file."""
    return WeightFile(name=require_name(path.name, "name"), sha256=sha256_of(path), size_bytes=path.stat().st_size)


def _link_or_copy(source: Path, target: Path, file: WeightFile) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError as error:
        raise NotFound(f"{file.name} (sha256 {file.sha256[:16]}) is not in the store") from error
    except OSError:  # another disk, another owner, or a file system without links
        try:
            shutil.copyfile(source, target)
        except FileNotFoundError as error:
            raise NotFound(f"{file.name} (sha256 {file.sha256[:16]}) is not in the store") from error


def _date(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return -1


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise StorageFull("the weight store's disk is full: free space or keep fewer versions") from error
        raise
