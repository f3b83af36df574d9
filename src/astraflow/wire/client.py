"""``HttpDataflow``: the protocol ``Dataflow`` for a process that is elsewhere. No torch, so that any trainer can join.

Safe to call again, so it does that by itself, within the one budget of ``transport.Retry``; what it raises is final.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from astraflow.errors import ConfigError, UnknownVersion
from astraflow.types import Manifest, Record, WeightFile
from astraflow.wire import messages as m
from astraflow.wire.calls import CALLS, MANY, POOL, PREFIX, STATUS
from astraflow.wire.codec import encode
from astraflow.wire.many import Submits
from astraflow.wire.names import require_manifest
from astraflow.wire.rate import ByteRate
from astraflow.wire.transfer import Transfer
from astraflow.wire.transport import Retry, Transport

R = TypeVar("R", bound=Record)

STATUS_LIMIT_BYTES = 64 << 20
RELAY_RETRY_S = 6.0


class HttpDataflow:
    """Use as an async context manager, or call ``close``.

    ``retry_s``: how long a call may go on trying while dataflow cannot be reached. ``timeout_s``: of one attempt, the
    wait of a long poll not counted. ``ca``: certificate file to trust beside the system's, for self-made ones.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        *,
        retry_s: float = 120.0,
        attempts: int = 60,
        timeout_s: float = 30.0,
        seed: int = 0,
        ca: Path | None = None,
        rate: ByteRate | None = None,
    ) -> None:
        """``rate``: of weight files up and down."""
        retry = Retry(budget_s=retry_s, attempts=attempts)
        trust = None if ca is None else trusting(ca)
        self._transport = Transport(url, token, retry=retry, timeout_s=timeout_s, seed=seed, ssl_context=trust)
        self._submits = Submits(self._submit_one, self._submit_many)
        self.weights = Transfer(self._transport, rate=rate)
        """Upload and download of weight files."""

    @property
    def url(self) -> str:
        return self._transport.url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. A later call opens new ones."""
        await self._submits.close()
        await self._transport.close()

    async def hello(self, request: m.HelloRequest) -> m.HelloReply:
        return await self._call("hello", request, m.HelloReply)

    # ── rollout side ──

    async def lease(self, request: m.LeaseRequest) -> m.LeaseReply:
        reply = await self._call("lease", request, m.LeaseReply, wait_s=request.wait_s)
        _check(reply.manifests)
        return reply

    async def renew(self, request: m.RenewRequest) -> m.RenewReply:
        reply = await self._call("renew", request, m.RenewReply)
        _check(reply.manifests)
        return reply

    async def submit(self, request: m.SubmitRequest) -> m.SubmitReply:
        """Episodes that are submitted in one turn of the loop travel together; each has its own answer."""
        return await self._submits.submit(request)

    async def _submit_one(self, body: bytes) -> m.SubmitReply:
        return await self._send("submit", body, m.SubmitReply)

    async def _submit_many(self, request: m.SubmitManyRequest) -> m.SubmitManyReply:
        return await self._send(MANY.name, encode(request), m.SubmitManyReply)

    async def hand_back(self, request: m.HandBackRequest) -> m.Done:
        return await self._call("hand_back", request, m.Done)

    # ── trainer side ──

    async def resume(self, request: m.ResumeRequest) -> m.ResumeReply:
        return await self._call("resume", request, m.ResumeReply)

    async def batch(self, request: m.BatchRequest) -> m.BatchReply:
        return await self._call("batch", request, m.BatchReply, wait_s=request.wait_s)

    async def commit(self, request: m.CommitRequest) -> m.CommitReply:
        return await self._call("commit", request, m.CommitReply)

    async def fail(self, request: m.FailRequest) -> m.FailReply:
        return await self._call("fail", request, m.FailReply)

    async def publish(self, request: m.PublishRequest) -> m.PublishReply:
        return await self._call("publish", request, m.PublishReply)

    # ── everyone ──

    async def manifest(self, request: m.ManifestRequest) -> Manifest:
        return require_manifest(await self._call("manifest", request, Manifest))

    async def report(self, request: m.ReportRequest) -> m.Done:
        return await self._call("report", request, m.Done)

    async def status(self) -> m.StatusReply:
        return await self._transport.fetch(f"{PREFIX}/{STATUS}", m.StatusReply, limit_bytes=STATUS_LIMIT_BYTES)

    async def pool(self) -> m.PoolReply:
        return await self._transport.fetch(f"{PREFIX}/{POOL}", m.PoolReply, limit_bytes=STATUS_LIMIT_BYTES)

    async def events(self, request: m.EventsRequest) -> m.EventsReply:
        return await self._call("events", request, m.EventsReply)

    async def operate(self, request: m.OperatorRequest) -> m.Done:
        return await self._call("operate", request, m.Done)

    async def _call(self, name: str, request: Record, kind: type[R], *, wait_s: float = 0.0) -> R:
        return await self._send(name, encode(request), kind, wait_s=wait_s)

    async def _send(self, name: str, body: bytes, kind: type[R], *, wait_s: float = 0.0) -> R:
        limit = (MANY if name == MANY.name else CALLS[name]).reply_limit_bytes
        return await self._transport.call(f"{PREFIX}/{name}", body, kind, limit_bytes=limit, wait_s=wait_s)


class RelayLink:
    """A worker's connection to the data port of another one: short patience, as the origin is there too."""

    def __init__(
        self, url: str, token: str | None, *, ca: Path | None = None, rate: ByteRate | None = None, seed: int = 0
    ) -> None:
        """``token``: of ``serve_relay.relay_token``."""
        trust = None if ca is None else trusting(ca)
        retry = Retry(budget_s=RELAY_RETRY_S, attempts=4)
        self._transport = Transport(url, token, retry=retry, timeout_s=5.0, seed=seed, ssl_context=trust, connections=8)
        self._transfer = Transfer(self._transport, rate=rate)

    async def held(self, file: WeightFile, *, pull: bool = False) -> int | None:
        return await self._transfer.held(file, pull=pull)

    async def download(self, file: WeightFile, into: Path) -> None:
        await self._transfer.download(file, into)

    async def close(self) -> None:
        await self._transport.close()


def _check(manifests: dict[str, Manifest]) -> None:
    """Manifests name files that will be written here."""
    for policy, manifest in manifests.items():
        if require_manifest(manifest).policy != policy:
            raise UnknownVersion(f"dataflow announced a manifest of {manifest.policy} as one of {policy}")


def trusting(ca: Path) -> ssl.SSLContext:
    """Of a client that trusts this certificate beside the system's. Raises ConfigError."""
    try:
        context = ssl.create_default_context()
        context.load_verify_locations(ca)
        return context
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"certificate {ca} cannot be read: {type(error).__name__}") from error
