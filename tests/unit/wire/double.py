"""A Dataflow that answers what the golden examples say, notes what it was asked, and can be told to do otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from astraflow.types import Manifest
from astraflow.wire import messages as m
from tests.golden.examples import EXAMPLES


class ScriptedDataflow:
    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.instead: dict[str, Callable[[Any], Awaitable[Any]]] = {}
        """Call name → what to do for it."""
        self.began = asyncio.Event()

    async def _answer(self, name: str, request: Any, reply: type[Any]) -> Any:
        self.seen.append(request)
        self.began.set()
        if name in self.instead:
            return await self.instead[name](request)
        return EXAMPLES[reply.__name__]

    async def hello(self, request: m.HelloRequest) -> m.HelloReply:
        return await self._answer("hello", request, m.HelloReply)

    async def lease(self, request: m.LeaseRequest) -> m.LeaseReply:
        return await self._answer("lease", request, m.LeaseReply)

    async def renew(self, request: m.RenewRequest) -> m.RenewReply:
        return await self._answer("renew", request, m.RenewReply)

    async def submit(self, request: m.SubmitRequest) -> m.SubmitReply:
        return await self._answer("submit", request, m.SubmitReply)

    async def hand_back(self, request: m.HandBackRequest) -> m.Done:
        return await self._answer("hand_back", request, m.Done)

    async def resume(self, request: m.ResumeRequest) -> m.ResumeReply:
        return await self._answer("resume", request, m.ResumeReply)

    async def batch(self, request: m.BatchRequest) -> m.BatchReply:
        return await self._answer("batch", request, m.BatchReply)

    async def commit(self, request: m.CommitRequest) -> m.CommitReply:
        return await self._answer("commit", request, m.CommitReply)

    async def fail(self, request: m.FailRequest) -> m.FailReply:
        return await self._answer("fail", request, m.FailReply)

    async def publish(self, request: m.PublishRequest) -> m.PublishReply:
        return await self._answer("publish", request, m.PublishReply)

    async def manifest(self, request: m.ManifestRequest) -> Manifest:
        return await self._answer("manifest", request, Manifest)

    async def report(self, request: m.ReportRequest) -> m.Done:
        return await self._answer("report", request, m.Done)

    async def status(self) -> m.StatusReply:
        return await self._answer("status", None, m.StatusReply)

    async def pool(self) -> m.PoolReply:
        return await self._answer("pool", None, m.PoolReply)

    async def events(self, request: m.EventsRequest) -> m.EventsReply:
        return await self._answer("events", request, m.EventsReply)

    async def operate(self, request: m.OperatorRequest) -> m.Done:
        return await self._answer("operate", request, m.Done)


def example_request(name: str, kind: type[Any], **changes: Any) -> Any:
    return msgspec.structs.replace(EXAMPLES[kind.__name__], **changes)
