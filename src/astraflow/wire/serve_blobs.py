"""Weight files over HTTP: ranged reads, and writes that are visible only when their hash is right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from astraflow.errors import BadRequest, DigestMismatch, NotFound, TooLarge
from astraflow.wire.blobs import Blobs, Incoming
from astraflow.wire.calls import PREFIX
from astraflow.wire.messages import Done
from astraflow.wire.names import require_sha256
from astraflow.wire.replies import record_response
from astraflow.wire.tokens import Grant

CHUNK_BYTES = 1 << 20
IDLE_S = 60.0
"""An upload that sends nothing for so long is given up."""


class BlobEndpoints:
    """GET (with ranges), HEAD and PUT of ``/v1/weights/{sha256}``."""

    def __init__(self, blobs: Blobs, grant: Callable[[web.Request], Grant | None], *, limit_bytes: int) -> None:
        self._blobs = blobs
        self._grant = grant
        self._limit_bytes = limit_bytes

    def routes(self) -> list[web.RouteDef]:
        path = f"{PREFIX}/weights/{{sha256}}"
        return [web.get(path, self.get), web.put(path, self.put)]

    async def get(self, request: web.Request) -> web.StreamResponse:
        """The file, or the part that the Range header asks for; sent by the kernel where it can."""
        self._grant(request)
        sha256 = require_sha256(request.match_info["sha256"], "sha256")
        path = await asyncio.to_thread(self._blobs.path, sha256)
        if path is None:
            raise NotFound(f"there is no weight file {sha256}")
        return web.FileResponse(path, headers={"Content-Type": "application/octet-stream", "ETag": f'"{sha256}"'})

    async def put(self, request: web.Request) -> web.StreamResponse:
        """Store a file. A file that is already here is acknowledged without being read."""
        grant = self._grant(request)
        if grant is not None:
            grant.require_upload()
        sha256 = require_sha256(request.match_info["sha256"], "sha256")
        announced = request.content_length
        if announced is not None and announced > self._limit_bytes:
            raise TooLarge(f"a weight file of {announced} bytes is over the limit of {self._limit_bytes}")
        if await asyncio.to_thread(self._blobs.path, sha256) is not None:
            return record_response(Done())
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
