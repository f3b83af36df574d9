"""``Dataflow`` by direct call, for everything in one process. Holds nothing; the service does."""

from __future__ import annotations

from astraflow.dataflow.service import DataflowService
from astraflow.types import Manifest
from astraflow.wire import messages as m


class LocalDataflow:
    def __init__(self, service: DataflowService) -> None:
        self._service = service

    async def hello(self, request: m.HelloRequest) -> m.HelloReply:
        return await self._service.hello(request)

    async def lease(self, request: m.LeaseRequest) -> m.LeaseReply:
        return await self._service.lease(request)

    async def renew(self, request: m.RenewRequest) -> m.RenewReply:
        return await self._service.renew(request)

    async def submit(self, request: m.SubmitRequest) -> m.SubmitReply:
        return await self._service.submit(request)

    async def hand_back(self, request: m.HandBackRequest) -> m.Done:
        return await self._service.hand_back(request)

    async def resume(self, request: m.ResumeRequest) -> m.ResumeReply:
        return await self._service.resume(request)

    async def batch(self, request: m.BatchRequest) -> m.BatchReply:
        return await self._service.batch(request)

    async def commit(self, request: m.CommitRequest) -> m.CommitReply:
        return await self._service.commit(request)

    async def publish(self, request: m.PublishRequest) -> m.PublishReply:
        return await self._service.publish(request)

    async def fail(self, request: m.FailRequest) -> m.FailReply:
        return await self._service.fail(request)

    async def manifest(self, request: m.ManifestRequest) -> Manifest:
        return await self._service.manifest(request)

    async def report(self, request: m.ReportRequest) -> m.Done:
        return await self._service.report(request)

    async def status(self) -> m.StatusReply:
        return await self._service.status()

    async def pool(self) -> m.PoolReply:
        return await self._service.pool()

    async def events(self, request: m.EventsRequest) -> m.EventsReply:
        return await self._service.events(request)

    async def operate(self, request: m.OperatorRequest) -> m.Done:
        return await self._service.operate(request)
