"""Weight files to and from the server: ranged downloads that go on where they broke, whole uploads."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from astraflow.errors import DigestMismatch, NotFound, ProtocolError, Unavailable
from astraflow.types import WeightFile
from astraflow.wire.calls import COMING_HEADER, PREFIX
from astraflow.wire.messages import Done
from astraflow.wire.names import require_sha256
from astraflow.wire.rate import ByteRate
from astraflow.wire.transport import Transport, read_record, require_success

CHUNK_BYTES = 1 << 20
REPLY_LIMIT_BYTES = 64 << 10
ASK_S = 5.0
IDLE_S = 30.0
"""A transfer that moves no byte for so long is broken off and tried again."""


class Transfer:
    """Files by content; each call has the retry budget of its transport *between* bytes that arrive."""

    def __init__(self, transport: Transport, *, rate: ByteRate | None = None) -> None:
        """``rate``: of all uploads and downloads of this process together."""
        self._transport = transport
        self._rate = rate

    async def has(self, sha256: str) -> bool:
        """Whether the server's store holds the file."""
        path = _path(sha256)

        async def attempt(timeout_s: float) -> bool:
            async with self._transport.request("HEAD", path, timeout_s=timeout_s) as response:
                if response.status == 404:
                    return False
                # An answer to HEAD has no body to explain itself with.
                if response.status >= 500:
                    raise Unavailable(f"{path} answered {response.status}")
                if response.status != 200:
                    raise ProtocolError(f"{path} answered {response.status}: may this token read weights?")
                return True

        return await self._transport.retried(path, attempt, timeout_s=IDLE_S)

    async def held(self, file: WeightFile, *, pull: bool = False) -> int | None:
        """Bytes that the server has of the file, all of them or fewer while it gets it; None: it cannot be had there.

        ``pull``: a relay that lacks it shall get it.
        """
        path = _path(file.sha256) + (f"?pull={file.size_bytes}" if pull else "")

        async def attempt(timeout_s: float) -> int | None:
            async with self._transport.request("HEAD", path, timeout_s=timeout_s) as response:
                if response.status in (200, 404):
                    # A file of another size there is not this one, whatever it is called.
                    return file.size_bytes if response.content_length == file.size_bytes else None
                coming = response.headers.get(COMING_HEADER, "")
                if response.status == 503 and coming.isascii() and coming.isdigit() and len(coming) < 16:
                    return min(int(coming), max(0, file.size_bytes - 1))
                raise ProtocolError(f"{path} answered {response.status}: is this a relay?")

        return await self._transport.retried(path, attempt, timeout_s=ASK_S)

    async def upload(self, source: Path, file: WeightFile) -> None:
        """Send ``source``; the server keeps it only if it is what ``file`` says. Nothing is sent that is there, and it
        then counts as sent now: a server deletes what nobody wanted for long."""
        if await self._refresh(file):
            return
        path = _path(file.sha256)

        async def attempt(timeout_s: float) -> Done:
            headers = {"Content-Length": str(file.size_bytes), "Content-Type": "application/octet-stream"}
            parts = _parts(source, self._rate)
            async with self._transport.request(
                "PUT", path, timeout_s=None, idle_s=4 * IDLE_S, data=parts, headers=headers
            ) as response:
                return await read_record(response, Done, limit_bytes=REPLY_LIMIT_BYTES)

        await self._transport.retried(path, attempt, timeout_s=IDLE_S)

    async def _refresh(self, file: WeightFile) -> bool:
        path = _path(file.sha256) + "?refresh=1"

        async def attempt(timeout_s: float) -> bool:
            async with self._transport.request(
                "PUT", path, timeout_s=timeout_s, headers={"Content-Length": "0"}
            ) as found:
                if found.status == 404:
                    return False
                await read_record(found, Done, limit_bytes=REPLY_LIMIT_BYTES)
                return True

        return await self._transport.retried(path, attempt, timeout_s=IDLE_S)

    async def download(self, file: WeightFile, into: Path) -> None:
        """Write the file's bytes to ``into``, going on after what an earlier try left there; verified at the end.

        Raises DigestMismatch (and removes ``into``), NotFound if the store no longer has it, Unavailable.
        """
        path = _path(file.sha256)
        while True:
            have = await asyncio.to_thread(_size_of, into)
            if have > file.size_bytes:
                await asyncio.to_thread(into.unlink)
                have = -1
            if have == file.size_bytes:
                break

            async def attempt(timeout_s: float) -> None:
                await self._receive(path, file, into)

            try:
                await self._transport.retried(path, attempt, timeout_s=IDLE_S)
            except Unavailable:
                # Bytes that arrived are progress: the budget is for silence, not for a slow or shaky line.
                if await asyncio.to_thread(_size_of, into) <= have:
                    raise
        await asyncio.to_thread(verify, into, file)

    async def _receive(self, path: str, file: WeightFile, into: Path) -> None:
        have = await asyncio.to_thread(_size_of, into)
        headers = {"Range": f"bytes={have}-"} if have > 0 else {}
        async with self._transport.request("GET", path, timeout_s=None, idle_s=IDLE_S, headers=headers) as response:
            await require_success(response)
            whole = response.status == 200
            piece = CHUNK_BYTES if self._rate is None else self._rate.piece_bytes(CHUNK_BYTES)
            with await asyncio.to_thread(into.open, "wb" if whole else "ab") as out:
                await self._write(response.content.iter_chunked(piece), out, file, 0 if whole else max(have, 0))

    async def _write(self, chunks: AsyncIterator[bytes], out: BinaryIO, file: WeightFile, size: int) -> None:
        async for chunk in chunks:
            size += len(chunk)
            if size > file.size_bytes:
                raise ProtocolError(f"{file.name}: more than {file.size_bytes} bytes arrived")
            if self._rate is not None:
                await self._rate.take(len(chunk))
            await asyncio.to_thread(out.write, chunk)
        if size < file.size_bytes:
            raise Unavailable(f"{file.name}: the connection ended at byte {size} of {file.size_bytes}")


def verify(path: Path, file: WeightFile) -> None:
    """Raise DigestMismatch, and remove the file, unless it is exactly what ``file`` says."""
    found = sha256_of(path)
    size = path.stat().st_size
    if found != file.sha256 or size != file.size_bytes:
        path.unlink(missing_ok=True)
        raise DigestMismatch(
            f"{file.name}: expected {file.size_bytes} bytes of sha256 {file.sha256[:16]}, found {size} of {found[:16]}"
        )


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise NotFound(f"there is no file {path}") from error


async def _parts(source: Path, rate: ByteRate | None) -> AsyncIterator[bytes]:
    piece = CHUNK_BYTES if rate is None else rate.piece_bytes(CHUNK_BYTES)
    with await asyncio.to_thread(source.open, "rb") as file:
        while chunk := await asyncio.to_thread(file.read, piece):
            if rate is not None:
                await rate.take(len(chunk))
            yield chunk


def _size_of(path: Path) -> int:
    """-1: there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def _path(sha256: str) -> str:
    return f"{PREFIX}/weights/{require_sha256(sha256, 'sha256')}"
