"""A port that serves an aiohttp application: binding, its URL, its end. Dataflow's and both data ports are such."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
import ssl
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from astraflow.errors import BadRequest, ConfigError
from astraflow.wire.replies import error_response

log = logging.getLogger("astraflow.wire")


class Listener:
    """``start``, then ``url``; ``close`` in the end."""

    def __init__(
        self,
        app: web.Application,
        *,
        host: str,
        port: int,
        address: str = "",
        ssl: ssl.SSLContext | None = None,
        close_s: float,
    ) -> None:
        """``port`` 0: any free one. ``address``: what others call this machine, if not ``host``."""
        self._app, self._ssl, self._close_s = app, ssl, close_s
        self._host, self._port, self._address = host, port, address or host
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Where others find it; the port is the real one once it has started."""
        host = f"[{self._address}]" if ":" in self._address else self._address
        return f"{'https' if self._ssl else 'http'}://{host}:{self._port}"

    @property
    def is_open(self) -> bool:
        return self._runner is not None

    async def start(self) -> None:
        """Raises ConfigError if the address cannot be had."""
        # Bodies are taken as they come: who sends a compressed one is told so, and nothing is unpacked for him.
        runner = _Runner(
            self._app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=self._close_s,
            auto_decompress=False,
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port, ssl_context=self._ssl).start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(_bind_sentence(self._host, self._port, error)) from error
        self._runner = runner
        self._port = int(runner.addresses[0][1])

    async def close(self) -> None:
        """Stop listening; what is being answered has ``close_s``. A second time it does nothing."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()


class _Connection(web.RequestHandler):
    """One caller's. What is no HTTP reaches no handler of ours: it is refused here, and nothing of it is told."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        log.warning("no_http remote=%s error=%s: refused and hung up", request.remote, type(exc).__name__)
        response = error_response(
            BadRequest("this is no HTTP/1.1 request; an https:// URL is for a port with a certificate")
        )
        response.force_close()
        return response


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Runner(web.AppRunner):
    """An application's runner, with connections of ours: aiohttp has no setting for them."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        options: dict[str, Any] = {**made._kwargs, "handler_cancellation": made.handler_cancellation}
        return _Server(made.request_handler, request_factory=made.request_factory, **options)


HIGHEST_PORT = 65535


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_port(host: str, port: int) -> None:
    """Raises ConfigError if nothing could listen there now. Port 0 is any free one."""
    if not 0 <= port <= HIGHEST_PORT:
        raise ConfigError(f"a port is between 0 (any free one) and {HIGHEST_PORT}, found {port}")
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return
    except OSError as error:
        raise ConfigError(_bind_sentence(host, port, error)) from error


def _bind_sentence(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use: stop what listens there or choose another port"
    return f"cannot listen on {host} port {port}: {error.strerror or error}"
