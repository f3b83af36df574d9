"""HTTP answers: records, errors as ``{kind, message}``, and bodies read within a limit and a deadline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import web

from astraflow.errors import AstraFlowError, BadRequest, NotFound, ServerError, TooLarge
from astraflow.types import Record
from astraflow.wire.calls import CONTENT_TYPE, RECORD_HEADER, WireError
from astraflow.wire.codec import encode, sentence

log = logging.getLogger("astraflow.wire")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def record_response(record: Record, *, status: int = 200) -> web.Response:
    """A record as msgpack, named in a header."""
    headers = {RECORD_HEADER: type(record).__name__}
    return web.Response(body=encode(record), status=status, content_type=CONTENT_TYPE, headers=headers)


def error_response(error: AstraFlowError, *, status: int | None = None) -> web.Response:
    """An error of the tree as its wire form."""
    body = WireError(kind=error.kind, message=sentence(error) or error.kind)
    return record_response(body, status=status or error.status)


@web.middleware
async def errors_as_records(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever a handler raises becomes one sentence; what nobody foresaw is logged here and not told."""
    try:
        return await handler(request)
    except AstraFlowError as error:
        return error_response(error)
    except web.HTTPNotFound:
        return error_response(NotFound(f"there is no {request.method} {request.path[:100]}"))
    except web.HTTPMethodNotAllowed as error:
        return error_response(BadRequest(f"{request.path[:100]} does not take {request.method}"), status=error.status)
    except web.HTTPException as error:
        return error_response(BadRequest(error.reason), status=error.status)
    except (ConnectionError, aiohttp.ClientPayloadError, web.RequestPayloadError):
        return error_response(BadRequest("the connection ended before the request did"))
    except Exception as error:  # noqa: BLE001 - one request's bug must not stop the service; the caller gets ServerError
        log_failure(request, error)
        return error_response(ServerError(f"{request.path[:100]} failed inside the service; its log has the cause"))


def log_failure(request: web.Request, error: Exception) -> None:
    """The cause of a ServerError, for whoever runs the service."""
    log.error("request_failed path=%s", request.path, exc_info=error)


async def read_body(request: web.Request, *, limit_bytes: int, deadline_s: float) -> bytes:
    """The whole body. TooLarge as soon as that is known, BadRequest if it does not arrive in time."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise BadRequest(f"a body must come as it is, not as Content-Encoding {encoding[:40]!r}")
    announced = request.content_length
    if announced is not None and announced > limit_bytes:
        raise TooLarge(f"a body of {announced} bytes is over the limit of {limit_bytes}")
    parts = []
    size = 0
    try:
        async with asyncio.timeout(deadline_s):
            async for part in request.content.iter_any():
                size += len(part)
                if size > limit_bytes:
                    raise TooLarge(f"the body is over the limit of {limit_bytes} bytes")
                parts.append(part)
    except TimeoutError as error:
        raise BadRequest(f"the body did not arrive within {deadline_s:g} s") from error
    return parts[0] if len(parts) == 1 else b"".join(parts)
