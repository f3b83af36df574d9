"""A worker's data port: weight files for its region, read only. Nothing depends on it.

    GET, HEAD /v1/weights/{sha256}[?pull=SIZE]

The bearer token is derived from the worker's own by HMAC, so that what one worker sends to another can read weights
and nothing else: it is worth nothing at dataflow. Where dataflow asks for no token, this port binds loopback only.
"""

from __future__ import annotations

import logging
import ssl

from aiohttp import web

from astraflow.errors import ConfigError, Unauthorised
from astraflow.wire.blobs import Pull, Readable
from astraflow.wire.listener import Listener, is_loopback
from astraflow.wire.rate import ByteRate
from astraflow.wire.replies import errors_as_records
from astraflow.wire.serve_blobs import BlobReader
from astraflow.wire.tokens import derived, is_bearer_of

log = logging.getLogger("astraflow.wire")

PURPOSE = b"astraflow relay 1"


def relay_token(worker_token: str | None) -> str | None:
    """What opens the data ports of a run's workers."""
    return derived(worker_token, PURPOSE)


class RelayServer:
    """``start``, then ``url``; ``close`` in the end."""

    def __init__(
        self,
        files: Readable,
        pull: Pull,
        *,
        token: str | None,
        host: str = "127.0.0.1",
        port: int = 0,
        address: str = "",
        ssl: ssl.SSLContext | None = None,
        rate: ByteRate | None = None,
        close_s: float = 2.0,
    ) -> None:
        """``address``: the host name under which others reach this port, if it is not ``host``. ``token``: of
        ``relay_token``."""
        if not is_loopback(host):
            if token is None:
                raise ConfigError(f"a relay on {host} without a token is refused: anyone could read the weights")
            if ssl is None:
                log.warning("no_tls relay_host=%s: weights cross the network readable; use --tls-cert", host)
        if host in ("0.0.0.0", "::") and not address:
            raise ConfigError(f"a relay on {host} must say its address: others cannot reach {host}")
        self._token = token
        self._app = web.Application(middlewares=[errors_as_records])
        self._app.add_routes(BlobReader(files, self._check, rate=rate, pull=pull).routes())
        self._listener = Listener(self._app, host=host, port=port, address=address, ssl=ssl, close_s=close_s)

    @property
    def url(self) -> str:
        """Where others find it; the port is the real one once it has started."""
        return self._listener.url

    async def start(self) -> None:
        """Listen. ConfigError if the address cannot be had."""
        await self._listener.start()

    async def close(self) -> None:
        """Stop listening; who is being served has ``close_s``, and resumes elsewhere."""
        await self._listener.close()

    def _check(self, request: web.Request) -> None:
        if self._token is not None and not is_bearer_of(self._token, request.headers.get("Authorization", "")):
            raise Unauthorised("this relay serves the workers of one run: the token is not theirs")
