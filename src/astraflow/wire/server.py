"""``Dataflow`` and a weight store over HTTP/1.1: a loop over the table in ``calls.py``. Decides nothing.

    POST /v1/{call}            msgpack → msgpack, errors {kind, message} with the class's status
    POST /v1/submit_many       several submits, each answered as if it had come alone
    GET  /v1/status, /v1/pool, /v1/pool/target        msgpack, or JSON if asked
    GET  /metrics              text for Prometheus
    GET, PUT /v1/weights/{sha256}

A caller that leaves a long poll consumes nothing: leases that it can no longer receive are handed back at once.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
from aiohttp import web

from astraflow.errors import AstraFlowError, ConfigError, NotFound, Unauthorised, Unavailable
from astraflow.types import Record
from astraflow.wire import many
from astraflow.wire import messages as m
from astraflow.wire.blobs import Blobs
from astraflow.wire.calls import CALLS, MANY, POOL, PREFIX, STATUS, TARGET, Call
from astraflow.wire.codec import decode
from astraflow.wire.finite import require_finite
from astraflow.wire.listener import Listener, is_loopback
from astraflow.wire.names import require_names, require_numbers
from astraflow.wire.protocol import Dataflow
from astraflow.wire.rate import ByteRate
from astraflow.wire.replies import errors_as_records, read_body, record_response
from astraflow.wire.serve_blobs import BlobEndpoints
from astraflow.wire.tokens import Grant, Tokens

log = logging.getLogger("astraflow.wire")

MAX_WAIT_S = 60.0
"""Longest long poll; a caller that asks for more is answered then and asks again."""
BODY_DEADLINE_S = 60.0
DECODE_IN_THREAD_BYTES = 1 << 20
LIMIT_ELEMENTS = 200_000
"""Of a request: an episode of a hundred turns has 2,000; counting this many takes 0.1 s."""
LARGEST_FILE_BYTES = 64 << 30


class Server:
    """Serves one run. Without tokens it binds loopback only and asks nobody who they are."""

    def __init__(
        self,
        dataflow: Dataflow,
        store: Blobs | None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tokens: Tokens | None,
        ssl: ssl.SSLContext | None = None,
        metrics: Callable[[], str] | None = None,
        close_s: float = 5.0,
        file_limit_bytes: int = LARGEST_FILE_BYTES,
        rate: ByteRate | None = None,
    ) -> None:
        """``rate``: of weight files that are read here, all readers together."""
        if not is_loopback(host):
            if tokens is None:
                raise ConfigError(f"binding {host} without tokens is refused: anyone could train or read this run")
            if ssl is None:
                log.warning("no_tls host=%s: tokens and prompts cross the network readable; use --tls-cert", host)
        self._dataflow = dataflow
        self._tokens = tokens
        self._metrics = metrics
        self._close_s = close_s
        self._polls: set[asyncio.Task[Any]] = set()
        self._calls: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._app = web.Application(middlewares=[errors_as_records], client_max_size=1 << 62)
        self._app.add_routes([web.post(f"{PREFIX}/{call.name}", self._handler(call)) for call in CALLS.values()])
        self._app.add_routes([web.post(f"{PREFIX}/{MANY.name}", self._submit_many)])
        self._app.add_routes([web.get(f"{PREFIX}/{name}", self._asked(name)) for name in (STATUS, POOL, TARGET)])
        self._app.add_routes([web.get("/metrics", self._metrics_text)])
        self._listener = Listener(self._app, host=host, port=port, ssl=ssl, close_s=close_s)
        if store is not None:
            self._app.add_routes(BlobEndpoints(store, self._grant, limit_bytes=file_limit_bytes, rate=rate).routes())

    @property
    def url(self) -> str:
        """Where it listens; the port is the real one once it has started."""
        return self._listener.url

    async def start(self) -> None:
        """Listen. ConfigError if the address cannot be had."""
        await self._listener.start()

    async def close(self) -> None:
        """Stop listening, end long polls as Unavailable, let running calls finish until the deadline."""
        if not self._listener.is_open:
            return
        self._closing = True
        for poll in self._polls:
            poll.cancel()
        await self._listener.close()
        if self._calls:
            await asyncio.wait(self._calls, timeout=self._close_s)

    # ── calls ──

    def _handler(self, call: Call) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        method: Callable[[Any], Coroutine[Any, Any, Record]] = getattr(self._dataflow, call.name)

        async def handle(request: web.Request) -> web.StreamResponse:
            grant = self._grant(request)
            if grant is not None:
                grant.require_role(call)
            message = await self._read(request, call)
            require_names(message)
            require_numbers(message)
            if grant is not None:
                grant.require_policy(call, message)
                grant.require_component(call, message)
            if call.polls:
                return await self._poll(request, method, message)
            task = self._keep(method(message), self._calls)
            return record_response(await asyncio.shield(task))

        return handle

    async def _submit_many(self, request: web.Request) -> web.StreamResponse:
        grant = self._grant(request)
        if grant is not None:
            grant.require_role(MANY)
        message = await self._read(request, MANY)
        task = self._keep(many.answer(message, self._dataflow.submit), self._calls)
        return record_response(await asyncio.shield(task))

    async def _read(self, request: web.Request, call: Call) -> Any:
        body = await read_body(request, limit_bytes=call.limit_bytes, deadline_s=BODY_DEADLINE_S)
        if len(body) > DECODE_IN_THREAD_BYTES:
            return await asyncio.to_thread(_decode, body, call)
        return _decode(body, call)

    async def _poll(
        self, request: web.Request, method: Callable[[Any], Coroutine[Any, Any, Record]], message: Any
    ) -> web.StreamResponse:
        """A held answer; written here, so that leases which cannot be delivered are known to be lost."""
        message = msgspec.structs.replace(message, wait_s=min(max(message.wait_s, 0.0), MAX_WAIT_S))
        task = self._keep(method(message), self._polls)
        try:
            response = record_response(await asyncio.shield(task))
            await response.prepare(request)
            await response.write_eof()
        except (asyncio.CancelledError, ConnectionError) as error:
            if self._closing and task.cancelled():
                raise Unavailable("dataflow is stopping: ask again") from error
            task.cancel()
            await asyncio.wait([task])
            await self._hand_back(message, task)
            raise
        return response

    async def _hand_back(self, message: Any, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or task.exception() is not None or not isinstance(message, m.LeaseRequest):
            return
        held = tuple(lease.id for lease in task.result().leases)
        if held:
            log.info("leases_handed_back worker=%s count=%d: it left before the answer", message.worker, len(held))
            give = self._dataflow.hand_back(m.HandBackRequest(worker=message.worker, held=held))
            await asyncio.wait([self._keep(give, self._calls)])

    def _keep(self, call: Coroutine[Any, Any, Any], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[Any]:
        """A task of its own, so that a caller who leaves does not end a transaction half-way."""
        if self._closing:
            call.close()
            raise Unavailable("dataflow is stopping: ask again")
        task = asyncio.create_task(call)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(_look_at_error)
        return task

    # ── the rest ──

    def _grant(self, request: web.Request) -> Grant | None:
        """Who calls. None: this server asks nobody. Raises Unauthorised."""
        if self._tokens is None:
            return None
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Unauthorised("no bearer token: give the one of this run in ASTRAFLOW_TOKEN")
        return self._tokens.grant(token.strip())

    def _asked(self, name: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        method: Callable[[], Coroutine[Any, Any, Record]] = {
            STATUS: self._dataflow.status,
            POOL: self._dataflow.pool,
            TARGET: self._target,
        }[name]

        async def handle(request: web.Request) -> web.StreamResponse:
            self._grant(request)
            reply = await asyncio.shield(self._keep(method(), self._calls))
            if "json" not in request.headers.get("Accept", ""):
                return record_response(reply)
            require_finite(reply)
            return web.Response(body=msgspec.json.encode(reply), content_type="application/json")

        return handle

    async def _target(self) -> Record:
        return (await self._dataflow.pool()).target

    async def _metrics_text(self, request: web.Request) -> web.StreamResponse:
        self._grant(request)
        if self._metrics is None:
            raise NotFound("this server has no metrics")
        return web.Response(text=self._metrics(), content_type="text/plain")


def _decode(body: bytes, call: Call) -> Any:
    return decode(body, call.request, limit_bytes=call.limit_bytes, limit_elements=LIMIT_ELEMENTS)


def _look_at_error(task: asyncio.Task[Any]) -> None:
    """Its caller may have left: an error that the tree does not know must still be seen by someone."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, AstraFlowError):
        log.error("call_failed %s", type(error).__name__, exc_info=error)
