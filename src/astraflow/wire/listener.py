"""A port that serves an aiohttp application: binding, its URL, its end. Dataflow's and both data ports are such."""

from __future__ import annotations

import errno
import ipaddress
import socket
import ssl

from aiohttp import web

from astraflow.errors import ConfigError


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
        runner = web.AppRunner(
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
