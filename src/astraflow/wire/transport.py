"""One HTTP call with its retries: the only place in the tree that tries again (F87).

A call has one budget, ``Retry``: so many attempts and so many seconds, whichever ends first, with exponential back-off
and seeded jitter. Only what may heal is tried again: no connection, no answer, ``Unavailable``. Everything else is
final and becomes the class that the answer names. A success is only a body that is the record asked for (F92).
"""

from __future__ import annotations

import asyncio
import io
import logging
import random
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import aiohttp

from astraflow.errors import AstraFlowError, BadRequest, ConfigError, ProtocolError, ServerError, Unavailable, by_kind
from astraflow.types import Record
from astraflow.wire.calls import CONTENT_TYPE, RECORD_HEADER, WireError
from astraflow.wire.codec import decode

R = TypeVar("R", bound=Record)
T = TypeVar("T")

log = logging.getLogger("astraflow.wire")

SAY_S = 5.0
"""A call that is tried again says so this often: nobody waits in silence."""
ERROR_LIMIT_BYTES = 64 << 10
DECODE_IN_THREAD_BYTES = 4 << 20
PIECES_FROM_BYTES = 1 << 19


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """The budget of one call, waits of a long poll not counted."""

    budget_s: float = 120.0
    """Long enough for a dataflow that is started again."""
    attempts: int = 60
    first_s: float = 0.1
    """Back-off before the second attempt; doubles from there, each times a factor in [0.5, 1]."""
    most_s: float = 5.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.budget_s < 0 or not 0 < self.first_s <= self.most_s:
            raise ConfigError(f"Retry needs attempts >= 1, budget_s >= 0 and 0 < first_s <= most_s, found {self}")

    def pause_s(self, attempt: int, rng: random.Random) -> float:
        """Seconds to wait after the failed attempt number ``attempt``, from 1."""
        return min(self.most_s, self.first_s * 2.0 ** min(attempt - 1, 30)) * rng.uniform(0.5, 1.0)


class Transport:
    """Connections to one server. Made anywhere, used from one event loop, closed there."""

    def __init__(
        self,
        url: str,
        token: str | None,
        *,
        retry: Retry,
        timeout_s: float,
        seed: int = 0,
        ssl_context: ssl.SSLContext | None = None,
        connections: int = 64,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"the URL of dataflow must start with http:// or https://, found {url[:100]!r}")
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._retry = retry
        self._timeout_s = timeout_s
        self._rng = random.Random(seed)
        self._ssl = ssl_context
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    async def call(self, path: str, body: bytes, kind: type[R], *, limit_bytes: int, wait_s: float = 0.0) -> R:
        """POST ``body``; the record that answers it."""

        async def attempt(timeout_s: float) -> R:
            # A large body goes in pieces, so that the loop can do other things meanwhile.
            sent = io.BytesIO(body) if len(body) > PIECES_FROM_BYTES else body
            async with self.request("POST", path, timeout_s=timeout_s, data=sent) as response:
                return await read_record(response, kind, limit_bytes=limit_bytes)

        return await self.retried(path, attempt, timeout_s=self._timeout_s + wait_s, grace_s=wait_s)

    async def fetch(self, path: str, kind: type[R], *, limit_bytes: int) -> R:
        """GET a record."""

        async def attempt(timeout_s: float) -> R:
            async with self.request("GET", path, timeout_s=timeout_s) as response:
                return await read_record(response, kind, limit_bytes=limit_bytes)

        return await self.retried(path, attempt, timeout_s=self._timeout_s)

    async def retried(
        self, path: str, attempt: Callable[[float], Awaitable[T]], *, timeout_s: float, grace_s: float = 0.0
    ) -> T:
        """Run ``attempt(seconds it may take)`` within the budget + ``grace_s``; Unavailable when it is spent."""
        clock = asyncio.get_running_loop().time
        began = said = clock()
        deadline = clock() + self._retry.budget_s + grace_s
        for number in range(1, self._retry.attempts + 1):
            try:
                return await attempt(max(0.001, min(timeout_s, deadline - clock())))
            except aiohttp.ClientSSLError as error:
                raise ConfigError(
                    f"{self.url} has no certificate that is trusted here: name it by --ca (ca= in Python)"
                ) from error
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, Unavailable) as error:
                last: Exception = error
            except aiohttp.ClientError as error:
                raise ProtocolError(
                    f"{self.url}{path}: the answer is not HTTP as we speak it ({_name(error)})"
                ) from error
            reason = str(last) if isinstance(last, Unavailable) else _name(last)
            pause = self._retry.pause_s(number, self._rng)
            if number == self._retry.attempts or clock() + pause >= deadline:
                break
            if clock() - said >= SAY_S:
                said = clock()
                log.warning(
                    "waits_for_dataflow url=%s%s for_s=%.0f gives_up_in_s=%.0f: %s",
                    self.url,
                    path,
                    said - began,
                    deadline - said,
                    reason,
                )
            await asyncio.sleep(pause)
        raise Unavailable(f"{self.url}{path} did not answer in {number} attempts ({reason})") from last

    def request(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float | None,
        idle_s: float | None = None,
        data: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> aiohttp.client._RequestContextManager:
        """One attempt. ``timeout_s`` bounds the whole of it, ``idle_s`` the silence between two reads.

        Redirects are not followed: they would carry the token elsewhere.
        """
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._connections)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, auto_decompress=False)
        limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0, sock_read=idle_s)
        extra = {"Content-Type": CONTENT_TYPE} if method == "POST" else {}
        return self._session.request(
            method,
            self.url + path,
            data=data,
            headers={**extra, **(headers or {})},
            timeout=limits,
            allow_redirects=False,
            ssl=self._ssl if self._ssl is not None else True,
        )

    async def close(self) -> None:
        """Close every connection; a later call opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


async def read_record(response: aiohttp.ClientResponse, kind: type[R], *, limit_bytes: int) -> R:
    """The record of a 200 answer. Raises the error that another answer names, ProtocolError for what is not ours."""
    await require_success(response)
    named = response.headers.get(RECORD_HEADER)
    if response.status != 200 or named != kind.__name__:
        raise ProtocolError(
            f"{response.url.path} answered {response.status} with {named or 'no'} record, not {kind.__name__}"
        )
    body = await read_limited(response, limit_bytes)
    try:
        if len(body) > DECODE_IN_THREAD_BYTES:
            return await asyncio.to_thread(decode, body, kind, limit_bytes=limit_bytes)
        return decode(body, kind, limit_bytes=limit_bytes)
    except BadRequest as error:
        raise ProtocolError(f"{response.url.path} answered with a broken record: {error}") from error


async def require_success(response: aiohttp.ClientResponse) -> None:
    """Raise the error that a non-2xx answer carries."""
    if 200 <= response.status < 300:
        return
    where = response.url.path
    if response.headers.get(RECORD_HEADER) == WireError.__name__:
        body = await read_limited(response, ERROR_LIMIT_BYTES)
        try:
            found = decode(body, WireError, limit_bytes=ERROR_LIMIT_BYTES)
        except BadRequest as error:
            raise ProtocolError(f"{where} answered {response.status} with a broken error: {error}") from error
        raise by_kind().get(found.kind, AstraFlowError)(found.message)
    if response.status in (502, 503, 504):
        raise Unavailable(f"{where} answered {response.status}: something before dataflow cannot reach it")
    if response.status >= 500:
        raise ServerError(f"{where} answered {response.status} without saying why")
    raise ProtocolError(f"{where} answered {response.status} and not as AstraFlow: is this its URL?")


async def read_limited(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """The body, or ProtocolError once it is over the limit."""
    parts = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > limit_bytes:
            raise ProtocolError(f"{response.url.path} answered with more than {limit_bytes} bytes")
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _name(error: Exception) -> str:
    """What happened, without the addresses and objects that such errors print."""
    inner = error.__cause__ if isinstance(error.__cause__, OSError) else error
    strerror = getattr(inner, "strerror", None)
    return f"{type(error).__name__}: {strerror}" if isinstance(strerror, str) and strerror else type(error).__name__
