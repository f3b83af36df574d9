"""The address where dataflow is to be found: its current process, or nobody.

Every call passes the real codec, as over HTTP, so that no two components ever share an object. A crash ends the calls
that are being handled; whoever waits for one gets ``Unavailable`` and cannot know whether it had its effect.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import msgspec

from astraflow.errors import AstraFlowError, Unavailable
from astraflow.testing.simulator.database import Database
from astraflow.testing.simulator.history import History
from astraflow.testing.simulator.promises import not_on_disk
from astraflow.wire import messages as m
from astraflow.wire.codec import decode, encode


class Service(Protocol):
    """A running dataflow: the calls of ``Dataflow`` beside this."""

    async def close(self) -> None: ...


class Host:
    """Stands in for ``Dataflow``: hand it to clients with a cast."""

    def __init__(self, database: Database, history: History) -> None:
        self.database = database
        self._history = history
        self._service: Any = None
        self._handling: set[asyncio.Task[Any]] = set()
        self._goes_on = asyncio.Event()
        """Not set while the process is stopped."""
        self._goes_on.set()

    @property
    def up(self) -> bool:
        return self._service is not None

    def open(self, service: Any) -> None:
        self._service = service

    def pause(self, seconds: float) -> bool:
        """SIGSTOP, and SIGCONT later: calls wait in its socket, its own time does not pass. False if it is not up."""
        if not self.up or not self._goes_on.is_set():
            return False
        self._goes_on.clear()
        asyncio.get_running_loop().call_later(seconds, self._goes_on.set)
        return True

    async def going_on(self) -> None:
        """Returns while the process may run."""
        await self._goes_on.wait()

    def down(self) -> None:
        """The process died: nobody answers here, and what was being handled is gone."""
        self._service = None
        self._goes_on.set()
        self.database.kill()
        for task in self._handling:
            task.cancel()

    # ── the calls ──

    async def hello(self, request: m.HelloRequest) -> Any:
        return await self._handle("hello", request)

    async def lease(self, request: m.LeaseRequest) -> Any:
        before = self._history.serials_of(request.incarnation)
        reply: m.LeaseReply = await self._handle("lease", request)
        for policy, manifest in reply.manifests.items():
            self._history.told_serial(request.incarnation, policy, manifest.serial, before=before)
        return reply

    async def renew(self, request: m.RenewRequest) -> Any:
        return await self._handle("renew", request)

    async def submit(self, request: m.SubmitRequest) -> Any:
        reply = await self._handle("submit", request)
        self._history.submitted(request)
        return reply

    async def hand_back(self, request: m.HandBackRequest) -> Any:
        return await self._handle("hand_back", request)

    async def resume(self, request: m.ResumeRequest) -> Any:
        return await self._handle("resume", request)

    async def batch(self, request: m.BatchRequest) -> Any:
        reply: m.BatchReply = await self._handle("batch", request)
        if reply.batch is not None:
            self._history.issued(reply.batch)
        return reply

    async def commit(self, request: m.CommitRequest) -> Any:
        return await self._handle("commit", request)

    async def fail(self, request: m.FailRequest) -> Any:
        return await self._handle("fail", request)

    async def publish(self, request: m.PublishRequest) -> Any:
        return await self._handle("publish", request)

    async def manifest(self, request: m.ManifestRequest) -> Any:
        return await self._handle("manifest", request)

    async def report(self, request: m.ReportRequest) -> Any:
        return await self._handle("report", request)

    async def status(self) -> Any:
        return await self._handle("status")

    async def pool(self) -> Any:
        return await self._handle("pool")

    async def events(self, request: m.EventsRequest) -> Any:
        return await self._handle("events", request)

    async def operate(self, request: m.OperatorRequest) -> Any:
        return await self._handle("operate", request)

    async def _handle(self, call: str, *requests: msgspec.Struct) -> Any:
        service = self._service
        if service is None:
            raise Unavailable("connection refused: dataflow is down")
        copies = [decode(encode(request), type(request)) for request in requests]
        await self.going_on()
        if self._service is not service:
            raise Unavailable("connection reset: dataflow died")
        task = asyncio.get_running_loop().create_task(getattr(service, call)(*copies), name=f"dataflow.{call}")
        self._handling.add(task)
        try:
            reply = await task
            await self.going_on()
            if self._service is not service:
                raise Unavailable("connection reset: dataflow died")
        except BaseException as error:
            if self._service is not service:
                raise Unavailable("connection reset: dataflow died") from None
            if not isinstance(error, AstraFlowError):  # a bug, or our own caller died
                raise
            self._history.note(f"{call} refused: {error.kind}")
            self._history.faults[f"refused/{call}/{error.kind}"] += 1
            raise
        finally:
            self._handling.discard(task)
            if not task.done():
                task.cancel()
        missing = not_on_disk(self.database.keeper, copies[0], reply) if copies else None
        if missing is not None:
            self._history.broken.append(missing)
        self._history.note(call)
        return decode(encode(reply), type(reply))
