"""A weight store in a bucket: S3, Google Cloud, Azure, a folder or memory, all by obstore.

    ObjectStore.open("s3://bucket/runs/7")          credentials and endpoint from the environment (AWS_…), never here

An object is visible when all of it is there: buckets promise that for single and multipart uploads alike. What is read
is checked by SHA-256 all the same. A read that is cut goes on where it broke; a read without progress ends.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Collection
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

import obstore
from obstore.exceptions import BaseError, NotFoundError, PermissionDeniedError, UnauthenticatedError

from astraflow.clock import Clock, SystemClock
from astraflow.disk import is_full
from astraflow.errors import AstraFlowError, ConfigError, Forbidden, NotFound, ProtocolError, StorageFull, Unavailable
from astraflow.types import WeightFile
from astraflow.weights.store import PART, SUFFIX, weight_file_of
from astraflow.wire.names import require_sha256
from astraflow.wire.rate import ByteRate
from astraflow.wire.transfer import verify

SCHEMES = ("s3", "s3a", "gs", "az", "file")
CHUNK_BYTES = 1 << 20
PART_BYTES = 8 << 20
"""Of a multipart upload."""
IDLE_S = 30.0
CLAIM = "astraflow-run"


class ObjectStore:
    """One prefix of a bucket. ``collect`` deletes only for its ``owner``."""

    def __init__(
        self,
        bucket: Any,
        *,
        prefix: str = "weights",
        owner: bool = False,
        grace_s: float = 30.0,
        attempts: int = 6,
        first_s: float = 0.2,
        rate: ByteRate | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``bucket``: an obstore store. ``attempts``: reads in a row that brought nothing; ``first_s``: the pause after
        the first of them, which doubles. ``grace_s``: as in ``DirStore``."""
        self._bucket = bucket
        self._prefix = prefix
        self._owner = owner
        self._grace_s = grace_s
        self._attempts = attempts
        self._first_s = first_s
        self._rate = rate
        self._clock = clock or SystemClock()
        self._rng = random.Random(0)
        self._unwanted: dict[str, tuple[Any, float]] = {}

    @classmethod
    def open(cls, url: str, *, owner: bool = False, rate: ByteRate | None = None) -> ObjectStore:
        """By URL. Raises ConfigError in one sentence if it cannot be one."""
        scheme, _, path = url.partition("://")
        if scheme not in SCHEMES or "://" not in url:
            raise ConfigError(
                f"a weight store's URL must begin with one of {', '.join(SCHEMES)}://, found {url[:80]!r}"
            )
        options: dict[str, Any] = {}
        if scheme == "file":
            if os.path.normpath(f"/{unquote(path)}").strip("/") == "":
                raise ConfigError(
                    f"weight store {url[:80]!r} is the root of the file system: name a folder, file:///..."
                )
            options = {"mkdir": True}
        else:
            options = {
                "client_options": {"read_timeout": f"{IDLE_S:g}s", "timeout": "1h", "allow_http": True},
                "retry_config": {"max_retries": 4, "retry_timeout": timedelta(seconds=60)},
            }
        try:
            return cls(obstore.store.from_url(url, **options), owner=owner, rate=rate)
        except (BaseError, ValueError, OSError) as error:
            raise ConfigError(f"weight store {url[:80]!r} cannot be opened: {_words(error)}") from error

    async def put(self, path: Path, *, may_link: bool = False) -> WeightFile:
        # Sent again where it is there already: a bucket has no other way to make an object young that promises to.
        file = await asyncio.to_thread(weight_file_of, path)
        small = file.size_bytes < PART_BYTES and self._rate is None
        data: Any = await asyncio.to_thread(path.read_bytes) if small else self._pieces(path)
        try:
            await obstore.put_async(
                self._bucket, self._key(file.sha256), data, chunk_size=PART_BYTES, max_concurrency=4
            )
        except (BaseError, OSError) as error:
            raise _as_ours(error, f"{file.name} could not be stored") from error
        return file

    async def get(self, file: WeightFile, into: Path) -> None:
        # One name per content: a pull that was broken off goes on with what it had, in this process or the next.
        part = into.with_name(f"{PART}{require_sha256(file.sha256, 'sha256')}")
        fruitless = 0
        while (have := await asyncio.to_thread(_size_of, part)) < file.size_bytes:
            try:
                await self._receive(file, part, have)
            except Unavailable:
                # Bytes that arrived are progress: patience is for silence, not for a slow or shaky line.
                fruitless = 0 if await asyncio.to_thread(_size_of, part) > have else fruitless + 1
                if fruitless == self._attempts:
                    raise
                pause = self._first_s * 2.0 ** min(fruitless, 6) * self._rng.uniform(0.5, 1.0)
                await asyncio.sleep(pause)
        await asyncio.to_thread(_finish, part, file, into)

    async def has(self, sha256: str) -> bool:
        try:
            await obstore.head_async(self._bucket, self._key(sha256))
        except (FileNotFoundError, NotFoundError):
            return False
        except (BaseError, OSError) as error:
            raise _as_ours(error, f"the bucket was asked for {sha256[:16]}") from error
        return True

    async def collect(self, keep: Collection[str], *, spare_s: float = 0.0) -> int:
        """Only weight files directly below the prefix are ever looked at: deeper ones may be another run's."""
        if not self._owner:
            return 0
        now = self._clock.monotonic()
        seen, self._unwanted = self._unwanted, {}
        doomed: list[tuple[str, Any]] = []
        try:
            listed = await obstore.list_with_delimiter_async(self._bucket, prefix=self._prefix)
            for meta in listed["objects"]:
                name = str(meta["path"]).rpartition("/")[2]
                if not name.endswith(SUFFIX) or name.removesuffix(SUFFIX) in keep:
                    continue
                mark, since = seen.get(name, (meta["last_modified"], now))
                since = since if mark == meta["last_modified"] else now  # put again: wanted again
                if now - since >= self._grace_s + spare_s:
                    doomed.append((str(meta["path"]), meta["last_modified"]))
                else:
                    self._unwanted[name] = (meta["last_modified"], since)
            old = [key for key, mark in doomed if await self._is_still(key, mark)]
            if old:
                await obstore.delete_async(self._bucket, old)
        except (BaseError, OSError) as error:
            self._unwanted = seen
            raise _as_ours(error, "the bucket could not be tidied") from error
        return len(old)

    async def _is_still(self, key: str, mark: Any) -> bool:
        """Not put again while the others were listed: a listing of many objects takes long."""
        try:
            found = await obstore.head_async(self._bucket, key)
        except (FileNotFoundError, NotFoundError):
            return False
        return bool(found["last_modified"] == mark)

    async def claim(self, who: str) -> None:
        """Note whose files these are; again is fine. ConfigError if they are another's: ``collect`` would delete them.

        Two who claim at the same moment: the later one finds the other's name.
        """
        key = f"{self._prefix}/{CLAIM}"
        try:
            found = await self._claimed(key)
            if found is None:
                await obstore.put_async(self._bucket, key, who.encode())
                found = await self._claimed(key)
        except (BaseError, OSError) as error:
            raise _as_ours(error, "the bucket could not be claimed") from error
        if found != who:
            raise ConfigError(f"this weight store belongs to the run {found}: give every run a prefix of its own")

    async def _claimed(self, key: str) -> str | None:
        try:
            found = await obstore.get_async(self._bucket, key)
            return bytes(await found.bytes_async()).decode("utf-8", "replace")
        except (FileNotFoundError, NotFoundError):
            return None

    # ── inside ──

    def _key(self, sha256: str) -> str:
        return f"{self._prefix}/{require_sha256(sha256, 'sha256')}{SUFFIX}"

    async def _pieces(self, path: Path) -> AsyncIterator[bytes]:
        size = CHUNK_BYTES if self._rate is None else self._rate.piece_bytes(CHUNK_BYTES)
        with await asyncio.to_thread(path.open, "rb") as source:
            while piece := await asyncio.to_thread(source.read, size):
                if self._rate is not None:
                    await self._rate.take(len(piece))
                yield piece

    async def _receive(self, file: WeightFile, part: Path, have: int) -> None:
        options: Any = {"range": {"offset": have}} if have > 0 else {}
        try:
            with await asyncio.to_thread(part.open, "ab" if have > 0 else "wb") as out:
                found = await obstore.get_async(self._bucket, self._key(file.sha256), options=options)
                if have > 0 and found.range[0] != have:
                    await asyncio.to_thread(out.truncate, 0)  # a server without ranges sends all of it
                size = CHUNK_BYTES if self._rate is None else self._rate.piece_bytes(CHUNK_BYTES)
                async for piece in found.stream(min_chunk_size=size):
                    await self._write(out, piece, file)
        except (FileNotFoundError, NotFoundError) as error:
            await asyncio.to_thread(part.unlink, missing_ok=True)
            raise NotFound(f"{file.name} (sha256 {file.sha256[:16]}) is not in the store") from error
        except (BaseError, OSError) as error:
            raise _as_ours(error, f"{file.name} broke off") from error
        if await asyncio.to_thread(_size_of, part) < file.size_bytes:
            raise Unavailable(f"{file.name}: the object ended before byte {file.size_bytes}")

    async def _write(self, out: BinaryIO, piece: Any, file: WeightFile) -> None:
        if self._rate is not None:
            await self._rate.take(len(piece))
        await asyncio.to_thread(out.write, piece)
        if out.tell() > file.size_bytes:
            raise ProtocolError(f"{file.name}: more than {file.size_bytes} bytes arrived")


def _finish(part: Path, file: WeightFile, into: Path) -> None:
    if not part.exists():  # of an empty file nothing arrives
        part.touch()
    try:
        verify(part, file)
        part.replace(into)
    except BaseException:
        with suppress(OSError):
            into.unlink(missing_ok=True)
        raise


def _size_of(path: Path) -> int:
    """-1: there is none, so that an empty file is asked for too."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def _as_ours(error: Exception, what: str) -> AstraFlowError:
    if is_full(error):
        return StorageFull("the weight store's disk is full: free space or keep fewer versions")
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return Forbidden(f"{what}: the bucket refuses these credentials")
    return Unavailable(f"{what}: {_words(error)}")


def _words(error: Exception) -> str:
    """The first line: what follows prints the library's insides, URLs with signatures among them."""
    return str(error).partition("\n")[0][:200] or type(error).__name__
