"""The one narrow seam between the three components: ``Dataflow``, by direct call or over HTTP.

``LocalDataflow`` (dataflow/local.py) and ``HttpDataflow`` (wire/client.py) implement it; the same tests run on both.
Every call is safe to send again: at-least-once delivery, exactly-once effect. Every call may raise
``Unauthorised``, ``Forbidden``, ``BadRequest``, ``StorageFull`` and, over HTTP, ``Unavailable`` after its retries.
"""

from __future__ import annotations

from typing import Protocol

from astraflow.types import Manifest
from astraflow.wire import messages as m


class Dataflow(Protocol):
    async def hello(self, request: m.HelloRequest) -> m.HelloReply:
        """Introduce a process. Raises ConfigMismatch (another config or code) or NameTaken."""

    # ── rollout side ──
    async def lease(self, request: m.LeaseRequest) -> m.LeaseReply:
        """Oldest pending episodes first; attempt += 1."""

    async def renew(self, request: m.RenewRequest) -> m.RenewReply:
        """Extend what is held; says which are lost. With nothing held: the heartbeat."""

    async def submit(self, request: m.SubmitRequest) -> m.SubmitReply:
        """Store an episode once. Raises Fenced, Closed, UnknownLease, UnknownVersion; a duplicate is acknowledged."""

    async def hand_back(self, request: m.HandBackRequest) -> m.Done:
        """Leases that will not be finished: pending again at once."""

    # ── trainer side ──
    async def resume(self, request: m.ResumeRequest) -> m.ResumeReply:
        """Register a trainer at its checkpoint and fence older ones. Raises UnknownVersion."""

    async def batch(self, request: m.BatchRequest) -> m.BatchReply:
        """The frozen batch (the identical one after a crash) or the reason why there is none. Raises Fenced."""

    async def commit(self, request: m.CommitRequest) -> m.CommitReply:
        """Acknowledge a step: the only call that advances a version. Raises Fenced, VersionConflict."""

    async def fail(self, request: m.FailRequest) -> m.FailReply:
        """This batch could not be trained."""

    async def publish(self, request: m.PublishRequest) -> m.PublishReply:
        """The next version of a policy that is a moving average of another one's. Raises BadRequest."""

    # ── everyone ──
    async def manifest(self, request: m.ManifestRequest) -> Manifest:
        """Where a version can be read. Raises NotFound."""

    async def report(self, request: m.ReportRequest) -> m.Done: ...

    async def status(self) -> m.StatusReply: ...

    async def pool(self) -> m.PoolReply:
        """The rollout workers, and how many there should be."""

    async def events(self, request: m.EventsRequest) -> m.EventsReply: ...

    async def operate(self, request: m.OperatorRequest) -> m.Done: ...
