"""Weight files over HTTP: ranged reads, and writes that are visible only when their hash is right.

A relay is asked for what it does not hold yet by ``?pull=SIZE``: it answers 503 with how many bytes it has by now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from astraflow.errors import BadRequest, DigestMismatch, NotFound, TooLarge
from astraflow.wire.blobs import Blobs, Incoming, Pull, Readable
from astraflow.wire.calls import COMING_HEADER, PREFIX
from astraflow.wire.messages import Done
from astraflow.wire.names import require_sha256
from astraflow.wire.rate import ByteRate
from astraflow.wire.replies import record_response
from astraflow.wire.tokens import Grant

CHUNK_BYTES = 1 << 20
IDLE_S = 60.0
"""An upload that sends nothing for so long is given up; so is a paced answer of which nobody takes anything."""
READERS = 64
"""Paced answers at once: each holds an open file."""


class BlobReader:
    """GET (with ranges) and HEAD of ``/v1/weights/{sha256}``."""

    def __init__(
        self,
        blobs: Readable,
        grant: Callable[[web.Request], object],
        *,
        rate: ByteRate | None = None,
        pull: Pull | None = None,
    ) -> None:
        """``rate``: of everything that is read here, together. ``pull``: what a relay does for a file that it lacks."""
        self._blobs = blobs
        self._grant = grant
        self._rate = rate
        self._pull = pull
        self._readers = asyncio.Semaphore(READERS)

    def routes(self) -> list[web.RouteDef]:
        return [web.get(f"{PREFIX}/weights/{{sha256}}", self.get)]

    async def get(self, request: web.Request) -> web.StreamResponse:
        """The file, or the part that the Range header asks for; sent by the kernel where no rate is set."""
        self._grant(request)
        sha256 = require_sha256(request.match_info["sha256"], "sha256")
        path = await asyncio.to_thread(self._blobs.path, sha256)
        if path is None:
            return self._absent(request, sha256)
        headers = {"Content-Type": "application/octet-stream", "ETag": f'"{sha256}"'}
        if self._rate is None or request.method == "HEAD":
            return web.FileResponse(path, headers=headers)
        async with self._readers:
            return await self._paced(request, path, headers, self._rate)

    def _absent(self, request: web.Request, sha256: str) -> web.Response:
        asked = request.query.get("pull", "")
        if self._pull is None or not asked:
            raise NotFound(f"there is no weight file {sha256}")
        if not (asked.isascii() and asked.isdigit() and len(asked) < 16):
            raise BadRequest(f"pull must be a size in bytes, found {asked[:40]!r}")
        have = self._pull(sha256, int(asked))
        if have is None:
            raise NotFound(f"weight file {sha256} cannot be had here")
        return web.Response(status=503, headers={COMING_HEADER: str(have), "Retry-After": "1"})

    async def _paced(
        self, request: web.Request, path: Path, headers: dict[str, str], rate: ByteRate
    ) -> web.StreamResponse:
        size = (await asyncio.to_thread(path.stat)).st_size
        try:
            start, stop, _ = request.http_range.indices(size)
        except ValueError as error:
            raise BadRequest("the Range header cannot be read") from error
        if start >= size > 0:
            return web.Response(status=416, headers={"Content-Range": f"bytes */{size}"})
        response = web.StreamResponse(status=206 if "Range" in request.headers else 200, headers=headers)
        response.content_length = stop - start
        if response.status == 206:
            response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        await response.prepare(request)
        with await asyncio.to_thread(path.open, "rb") as file:
            file.seek(start)
            left = stop - start
            while left and (piece := await asyncio.to_thread(file.read, min(left, rate.piece_bytes(CHUNK_BYTES)))):
                await rate.take(len(piece))
                await self._send(request, response, piece)
                left -= len(piece)
        await response.write_eof()
        return response

    async def _send(self, request: web.Request, response: web.StreamResponse, piece: bytes) -> None:
        """ConnectionError after ``IDLE_S``: 64 callers who read nothing would else keep everybody out."""
        try:
            async with asyncio.timeout(IDLE_S):
                await response.write(piece)
        except TimeoutError as error:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError(f"nobody took a byte for {IDLE_S:g} s") from error


class BlobEndpoints:
    """GET (with ranges), HEAD and PUT of ``/v1/weights/{sha256}``."""

    def __init__(
        self,
        blobs: Blobs,
        grant: Callable[[web.Request], Grant | None],
        *,
        limit_bytes: int,
        rate: ByteRate | None = None,
    ) -> None:
        self._blobs = blobs
        self._grant = grant
        self._limit_bytes = limit_bytes
        self._reader = BlobReader(blobs, grant, rate=rate)

    def routes(self) -> list[web.RouteDef]:
        return [*self._reader.routes(), web.put(f"{PREFIX}/weights/{{sha256}}", self.put)]

    async def put(self, request: web.Request) -> web.StreamResponse:
        """Store a file. One that is already here is acknowledged without being read, and counts as stored now; with
        ``?refresh=1`` that is all that is asked for."""
        grant = self._grant(request)
        if grant is not None:
            grant.require_upload()
        sha256 = require_sha256(request.match_info["sha256"], "sha256")
        announced = request.content_length
        if announced is not None and announced > self._limit_bytes:
            raise TooLarge(f"a weight file of {announced} bytes is over the limit of {self._limit_bytes}")
        if await asyncio.to_thread(self._blobs.refresh, sha256):
            return record_response(Done())
        if request.query.get("refresh"):
            raise NotFound(f"there is no weight file {sha256}")
        # Not in a thread: a caller who left meanwhile would leave a file that nobody aborts.
        incoming = self._blobs.incoming(sha256)
        try:
            await self._receive(request, incoming)
            await asyncio.to_thread(incoming.commit)
        except DigestMismatch as error:
            raise BadRequest(str(error)) from error
        finally:
            incoming.abort()
        return record_response(Done())

    async def _receive(self, request: web.Request, incoming: Incoming) -> None:
        size = 0
        chunks = request.content.iter_chunked(CHUNK_BYTES)
        while True:
            try:
                async with asyncio.timeout(IDLE_S):
                    chunk = await anext(chunks, None)
            except TimeoutError as error:
                raise BadRequest(f"the upload sent nothing for {IDLE_S:g} s") from error
            if chunk is None:
                return
            size += len(chunk)
            if size > self._limit_bytes:
                raise TooLarge(f"the weight file is over the limit of {self._limit_bytes} bytes")
            await asyncio.to_thread(incoming.write, chunk)
