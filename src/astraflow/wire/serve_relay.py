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
from astraflow.wire.rate import ByteRate
from astraflow.wire.replies import errors_as_records
from astraflow.wire.serve_blobs import BlobReader
from astraflow.wire.server import bind_sentence, is_loopback
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
        self._host, self._port, self._address, self._ssl = host, port, address or host, ssl
        self._close_s = close_s
        self._runner: web.AppRunner | None = None
        self._app = web.Application(middlewares=[errors_as_records])
        self._app.add_routes(BlobReader(files, self._check, rate=rate, pull=pull).routes())

    @property
    def url(self) -> str:
        """Where others find it; the port is the real one once it has started."""
        host = f"[{self._address}]" if ":" in self._address else self._address
        return f"{'https' if self._ssl else 'http'}://{host}:{self._port}"

    async def start(self) -> None:
        """Listen. ConfigError if the address cannot be had."""
        runner = web.AppRunner(self._app, handler_cancellation=True, access_log=None, shutdown_timeout=self._close_s)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port, ssl_context=self._ssl).start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(bind_sentence(self._host, self._port, error)) from error
        self._runner = runner
        self._port = int(runner.addresses[0][1])

    async def close(self) -> None:
        """Stop listening; who is being served has ``close_s``, and resumes elsewhere."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def _check(self, request: web.Request) -> None:
        if self._token is not None and not is_bearer_of(self._token, request.headers.get("Authorization", "")):
            raise Unauthorised("this relay serves the workers of one run: the token is not theirs")
