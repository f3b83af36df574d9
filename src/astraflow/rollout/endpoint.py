"""The data port of a worker that serves policies to others: one request of an engine, over HTTP.

    POST /v1/policies/{policy}/generate     GenerateRequest → GenerateReply, errors {kind, message}
    GET  /v1/policies/{policy}              EngineInfo

Nothing depends on it: whoever cannot reach it plays nothing that needs it. A caller that leaves frees its slot (F88).
The bearer token is derived from the worker's own, so that what workers send each other is worth nothing at dataflow;
without one it binds loopback only.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from astraflow.engines.base import GenerateRequest
from astraflow.errors import ConfigError, NotFound, Unauthorised, Unavailable
from astraflow.rollout.served import ServedPolicy
from astraflow.wire.codec import decode
from astraflow.wire.listener import Listener, is_loopback
from astraflow.wire.replies import errors_as_records, read_body, record_response
from astraflow.wire.tokens import derived, is_bearer_of

log = logging.getLogger("astraflow.rollout")

PURPOSE = b"astraflow engine 1"
PATH = "/v1/policies"
REQUEST_BYTES = 16 << 20
"""A prompt of four million tokens."""
BODY_DEADLINE_S = 60.0
CLOSE_S = 5.0

Hold = Callable[[str, int], Awaitable[None]]


def engine_token(worker_token: str | None) -> str | None:
    """What opens the engines of a run's workers to each other."""
    return derived(worker_token, PURPOSE)


class PolicyEndpoint:
    """Serves the worker's own policies; ``hold`` makes an engine hold the version that a request names."""

    def __init__(
        self,
        policies: Mapping[str, ServedPolicy],
        hold: Hold,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        address: str = "",
        token: str | None,
        ssl: ssl.SSLContext | None = None,
    ) -> None:
        """``token``: of ``engine_token``. ``address``: the host name under which others reach it, if not ``host``."""
        if token is None and not is_loopback(host):
            raise ConfigError(f"serving policies at {host} without a token is refused: anyone could use the engines")
        if not is_loopback(host) and ssl is None:
            log.warning("no_tls engine_host=%s: prompts and replies cross the network readable; use --tls-cert", host)
        self._policies, self._hold = policies, hold
        self._token = token
        self._app = web.Application(middlewares=[errors_as_records], client_max_size=1 << 62)
        self._listener = Listener(self._app, host=host, port=port, address=address, ssl=ssl, close_s=CLOSE_S)
        place = f"{PATH}/{{policy}}"
        self._app.add_routes([web.get(place, self._info), web.post(f"{place}/generate", self._generate)])

    @property
    def url(self) -> str:
        """Where it listens, as others may reach it; the port is the real one once it has started."""
        return self._listener.url

    async def start(self) -> None:
        """Listen. Raises ConfigError if the address cannot be had."""
        await self._listener.start()

    async def close(self) -> None:
        await self._listener.close()

    async def _info(self, request: web.Request) -> web.StreamResponse:
        return record_response(self._policy(request).engine.info())

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        served = self._policy(request)
        body = await read_body(request, limit_bytes=REQUEST_BYTES, deadline_s=BODY_DEADLINE_S)
        asked = decode(body, GenerateRequest, limit_bytes=REQUEST_BYTES)
        if asked.version is None:
            if not served.engine.info().versions:
                raise Unavailable(f"{served.policy} holds no version yet")
            return record_response(await served.engine.generate(asked))
        with served.pinned(asked.version):
            await self._hold(served.policy, asked.version)
            return record_response(await served.engine.generate(asked))

    def _policy(self, request: web.Request) -> ServedPolicy:
        if self._token is not None and not is_bearer_of(self._token, request.headers.get("Authorization", "")):
            raise Unauthorised("a policy is served to workers of its run only: the token is missing or wrong")
        name = request.match_info["policy"]
        if name not in self._policies:
            raise NotFound(f"policy {name[:40]!r} is not served here; served are {sorted(self._policies)}")
        return self._policies[name]
