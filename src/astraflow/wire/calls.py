"""The calls of ``Dataflow`` as data: what each takes and answers, who may make it, how large its body may be.

Server and client are loops over this table; a new call is a line here and a method of the protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from astraflow.types import Manifest, Record
from astraflow.wire import messages as m

PREFIX = "/v1"
CONTENT_TYPE = "application/msgpack"
RECORD_HEADER = "X-AstraFlow-Record"
"""Every answer names its record here: a body of defaults could be read from any map (F92)."""
COMING_HEADER = "X-AstraFlow-Coming"
"""Bytes that a relay has of a weight file that it is getting."""
MIB = 1 << 20


class Role(StrEnum):
    """Whom a token was made for."""

    WORKER = "worker"
    TRAINER = "trainer"
    OPERATOR = "operator"


class WireError(Record, frozen=True, kw_only=True):
    """Body of every answer that is not a success."""

    kind: str
    """Name of a class in ``errors.py``."""
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of the protocol over HTTP."""

    name: str
    request: type[Record]
    reply: type[Record]
    roles: frozenset[Role]
    limit_bytes: int = MIB
    """Of the request's body."""
    reply_limit_bytes: int = 64 * MIB
    polls: bool = False
    """The answer may be held; ended when the caller leaves."""


_EVERYONE = frozenset(Role)
_WORKER = frozenset({Role.WORKER})
_TRAINER = frozenset({Role.TRAINER})
_OPERATOR = frozenset({Role.OPERATOR})

CALLS = {
    call.name: call
    for call in (
        Call(name="hello", request=m.HelloRequest, reply=m.HelloReply, roles=_EVERYONE),
        Call(name="lease", request=m.LeaseRequest, reply=m.LeaseReply, roles=_WORKER, polls=True),
        Call(name="renew", request=m.RenewRequest, reply=m.RenewReply, roles=_WORKER),
        Call(name="submit", request=m.SubmitRequest, reply=m.SubmitReply, roles=_WORKER, limit_bytes=256 * MIB),
        Call(name="hand_back", request=m.HandBackRequest, reply=m.Done, roles=_WORKER),
        Call(name="resume", request=m.ResumeRequest, reply=m.ResumeReply, roles=_TRAINER),
        Call(
            name="batch",
            request=m.BatchRequest,
            reply=m.BatchReply,
            roles=_TRAINER,
            reply_limit_bytes=4096 * MIB,
            polls=True,
        ),
        Call(name="commit", request=m.CommitRequest, reply=m.CommitReply, roles=_TRAINER),
        Call(name="fail", request=m.FailRequest, reply=m.FailReply, roles=_TRAINER),
        Call(name="publish", request=m.PublishRequest, reply=m.PublishReply, roles=_TRAINER),
        Call(name="manifest", request=m.ManifestRequest, reply=Manifest, roles=_EVERYONE),
        Call(name="report", request=m.ReportRequest, reply=m.Done, roles=_EVERYONE),
        Call(name="events", request=m.EventsRequest, reply=m.EventsReply, roles=_OPERATOR),
        Call(name="operate", request=m.OperatorRequest, reply=m.Done, roles=_OPERATOR),
    )
}
MANY = Call(name="submit_many", request=m.SubmitManyRequest, reply=m.SubmitManyReply, roles=_WORKER)
"""An envelope for ``submit``, no call of the protocol. Its limit bounds what many small episodes may cost together."""
STATUS = "status"
"""GET, no body; every role."""
POOL = "pool"
TARGET = "pool/target"
"""GET, no body; every role."""
