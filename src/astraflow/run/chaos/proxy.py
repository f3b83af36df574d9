"""A TCP proxy between one component and dataflow, whose connections can be cut or slowed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

CHUNK_BYTES = 64 << 10
SLOW_DELAY_S = 0.1
"""What each piece waits while the way is slow."""
SLOW_BYTES_PER_S = 256 << 10


class Proxy:
    """``open`` gives the port; ``lead_to`` says where it leads. A connection while it leads nowhere is dropped."""

    def __init__(self) -> None:
        self.slow = False
        self._cut = False
        self._target: tuple[str, int] | None = None
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def open(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    def lead_to(self, host: str, port: int) -> None:
        self._target = (host, port)

    @property
    def cut(self) -> bool:
        return self._cut

    @cut.setter
    def cut(self, value: bool) -> None:
        """True resets what is open and drops what comes."""
        self._cut = value
        if value:
            for writer in list(self._open):
                _reset(writer)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in list(self._open):
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            if self._cut or self._target is None:
                _reset(writer)
                return
            there, back = await asyncio.open_connection(*self._target)
            self._open.add(back)
            try:
                async with asyncio.TaskGroup() as pumps:
                    pumps.create_task(self._pump(reader, back))
                    pumps.create_task(self._pump(there, writer))
            finally:
                self._open.discard(back)
                back.transport.abort()
        except* OSError:  # an end went away, which is what this is for
            pass
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while chunk := await source.read(CHUNK_BYTES):
            if self.slow:
                await asyncio.sleep(SLOW_DELAY_S + len(chunk) / SLOW_BYTES_PER_S)
            target.write(chunk)
            await target.drain()
        with contextlib.suppress(OSError):
            target.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection without a goodbye: what was not read yet is lost at both ends."""
    plain: socket.socket | None = writer.get_extra_info("socket")
    if plain is not None:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
