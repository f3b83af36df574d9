"""What goes over the wire beside the records of ``types.py``: one request and one reply per call of ``Dataflow``.

Same rules as every record: fields may be added with a default, never removed, renamed or retyped.
"""

from __future__ import annotations

from typing import Any

from astraflow.types import Batch, Episode, Lease, Manifest, Record
from astraflow.wire.pool_messages import PoolReply as PoolReply
from astraflow.wire.pool_messages import PoolTarget as PoolTarget
from astraflow.wire.pool_messages import PoolWorker as PoolWorker


class Capabilities(Record, frozen=True, kw_only=True):
    """What a worker can play. A lease goes only to a worker that covers every policy of the workflow."""

    policies: tuple[str, ...]
    """Served by itself or reachable by endpoint. Empty is right for a worker without an engine."""
    supervised: bool = True
    """May be given tasks of the workflow ``supervised`` (they need a tokenizer, no engine)."""
    code_digest: str = ""
    config_digest: str = ""
    dtype: str = ""
    max_context: int = 0
    versions_held: int = 1


class ComponentReport(Record, frozen=True, kw_only=True):
    """What a component says of itself; `astraflow status` shows one line of it."""

    doing: str = "starting"
    """An ``observe.waits.Wait`` value when it waits, else a short verb phrase."""
    since_s: float = 0.0
    """How long it has been doing that."""
    why: str = ""
    versions: dict[str, int] = {}
    """Version per policy that it serves or trains."""
    pulling: dict[str, int] = {}
    """Serial per policy whose files it is fetching: they are not deleted meanwhile."""
    endpoint: str = ""
    """URL at which it serves the policies of ``versions`` to other workers; empty: it does not."""
    metrics: dict[str, float] = {}
    error: str | None = None
    """First cause, if it is about to die of one."""
    region: str = ""
    """Where it is, as its starter says; workers of one region share weights."""
    relay: str = ""
    """URL of its data port; empty: it has none."""


class RelayPlace(Record, frozen=True, kw_only=True):
    """A worker's data port, as it announced it. It needs no trust: what it serves is checked by SHA-256."""

    worker: str
    incarnation: str
    url: str
    region: str = ""


class HelloRequest(Record, frozen=True, kw_only=True):
    component: str
    """``rollout`` or ``trainer``"""
    name: str
    incarnation: str
    """Random per process start: tells a restarted component from a second one of the same name."""
    config_digest: str = ""
    code_digest: str = ""
    policy: str | None = None
    config: dict[str, str] = {}
    """Path of each setting to its value as JSON, so that a refusal can name those that differ; empty: not told."""


class HelloReply(Record, frozen=True, kw_only=True):
    run: str
    config_digest: str
    heartbeat_s: float
    dead_after_s: float


class AddedPolicy(Record, frozen=True, kw_only=True):
    """A policy that joined a run which was going on. What it is like, everybody knows from the recipe."""

    name: str
    like: str
    """A policy of the recipe: same architecture, template, engine and trainer settings, bound and steps."""
    trainable: bool = True
    average_of: str = ""
    """Not empty: its versions are a moving average of this policy's."""
    decay: float = 0.0
    since: int = 0
    """Id of the newest group that was opened without it."""


class LeaseRequest(Record, frozen=True, kw_only=True):
    worker: str
    incarnation: str
    count: int
    """At most so many leases; the reply may hold fewer."""
    capabilities: Capabilities
    wait_s: float = 0.0
    """Long poll: hold the answer so long if there is nothing to lease."""
    versions: dict[str, int] = {}
    """What its engines hold now; empty: it does not say."""


class LeaseReply(Record, frozen=True, kw_only=True):
    leases: tuple[Lease, ...] = ()
    manifests: dict[str, Manifest] = {}
    """Newest of every policy, and what pinned leases need is asked for by ``manifest``."""
    reason: str | None = None
    """A ``WaitReason`` value when no lease could be given."""
    finished: bool = False
    """The run needs no more episodes: leave."""


class RenewRequest(Record, frozen=True, kw_only=True):
    worker: str
    incarnation: str
    held: tuple[str, ...] = ()
    """Lease ids. With nothing held it is the heartbeat."""
    report: ComponentReport = ComponentReport()


class RenewReply(Record, frozen=True, kw_only=True):
    lost: tuple[str, ...] = ()
    manifests: dict[str, Manifest] = {}
    endpoints: dict[str, tuple[str, ...]] = {}
    """Policy → where other workers that are alive serve it."""
    drain: bool = False
    finished: bool = False
    relays: tuple[RelayPlace, ...] = ()
    """Data ports of the other workers that are alive, those of the asker's region first."""
    added: tuple[AddedPolicy, ...] = ()


class SubmitRequest(Record, frozen=True, kw_only=True):
    worker: str
    group: int
    index: int
    attempt: int
    episode: Episode


class SubmitReply(Record, frozen=True, kw_only=True):
    duplicate: bool = False
    group_closed: bool = False


class SubmitManyRequest(Record, frozen=True, kw_only=True):
    """Several submits in one request, each judged as if it had come alone."""

    requests: tuple[bytes, ...]
    """Each an encoded SubmitRequest: a broken one harms no other."""


class SubmitAnswer(Record, frozen=True, kw_only=True):
    """One of them: a reply, or the error that it would have got alone."""

    reply: SubmitReply | None = None
    kind: str = ""
    """Name of a class in ``errors.py``."""
    message: str = ""


class SubmitManyReply(Record, frozen=True, kw_only=True):
    answers: tuple[SubmitAnswer, ...]
    """In the order of the requests."""


class HandBackRequest(Record, frozen=True, kw_only=True):
    """A draining worker gives back leases that it will not finish: they are pending again at once."""

    worker: str
    held: tuple[str, ...]


class ResumeRequest(Record, frozen=True, kw_only=True):
    policy: str
    version: int
    digest: str
    trainer: str
    incarnation: str
    manifest: Manifest | None = None
    """Where the checkpoint's weights can be read, written again in case the store no longer has them."""


class ResumeReply(Record, frozen=True, kw_only=True):
    trainer_epoch: int
    undone: tuple[int, ...] = ()
    """Batch ids un-committed because the trainer's checkpoint is older; they come again, first."""
    steps: int = 0
    """Committed steps at which the run of this policy ends."""
    finished: bool = False


class BatchRequest(Record, frozen=True, kw_only=True):
    policy: str
    trainer_epoch: int
    wait_s: float = 0.0
    report: ComponentReport = ComponentReport()


class BatchReply(Record, frozen=True, kw_only=True):
    batch: Batch | None = None
    reason: str | None = None
    """A ``WaitReason`` value when there is none yet."""
    why: str = ""
    """The same in words with counts: "5/8 groups; oldest episode 40 s on b2"."""
    finished: bool = False


class CommitRequest(Record, frozen=True, kw_only=True):
    policy: str
    batch: int
    trainer_epoch: int
    manifest: Manifest | None = None
    """None with a reason: the groups are dropped(reason), version and optimiser stay."""
    reason: str | None = None
    metrics: dict[str, float] = {}
    oldest_checkpoint: int | None = None
    """Version of the oldest checkpoint that the trainer keeps: what is in it need never come again. None: it has none,
    or does not say."""


class CommitReply(Record, frozen=True, kw_only=True):
    version: int
    duplicate: bool = False
    finished: bool = False


class FailRequest(Record, frozen=True, kw_only=True):
    policy: str
    batch: int
    trainer_epoch: int
    error: str
    failures: int | None = None
    """``Batch.failures`` of what failed: a call that comes late or twice is known by it, and counts once. None: of a
    trainer that does not say."""


class FailReply(Record, frozen=True, kw_only=True):
    failures: int
    stop: bool = False
    """This batch has killed its trainer three times: the run stops and names it."""


class ReportRequest(Record, frozen=True, kw_only=True):
    """A trainer's heartbeat while it steps, and any component's last words."""

    component: str
    name: str
    incarnation: str
    report: ComponentReport
    leaving: bool = False
    """It ends on purpose: these are its last words, ``report.why`` says why, and nothing more will be heard of it."""


class ManifestRequest(Record, frozen=True, kw_only=True):
    policy: str
    version: int | None = None
    """None: the newest serial."""


class ComponentStatus(Record, frozen=True, kw_only=True):
    component: str
    name: str
    state: str
    """``alive``, ``dead`` or ``left``"""
    heard_s: float
    """Seconds since it was last heard of."""
    report: ComponentReport
    held: int = 0
    """Leases held."""
    played: int = 0
    """Of a worker: episodes that it played to an outcome, since dataflow was started."""


class PolicyStatus(Record, frozen=True, kw_only=True):
    policy: str
    trainable: bool
    version: int
    steps: int
    groups: dict[str, int] = {}
    """Counts by state of this policy; dropped ones as ``dropped/reason``."""
    staleness: dict[str, int] = {}
    """Trained samples by age at use."""
    waits: str = ""
    """What the next batch still lacks, in words."""
    frozen: bool = False
    """Ended by a call before it had all its steps; another call has it trained on."""


class EvalPoint(Record, frozen=True, kw_only=True):
    """One finished evaluation. Lost or failed episodes count as wrong; ``coverage`` shows how many were graded."""

    policy: str
    version: int
    digest: str
    dataset: str
    score: float
    coverage: float
    episodes: int
    at_s: float
    """Seconds since the first lease."""
    pass_at: dict[str, float] = {}
    """k → pass@k by the unbiased estimator; empty where every task had one episode."""


class StatusReply(Record, frozen=True, kw_only=True):
    run: str
    state: str
    """``running``, ``finished`` or ``failed``"""
    error: str | None
    now_s: float
    policies: tuple[PolicyStatus, ...]
    components: tuple[ComponentStatus, ...]
    episodes: dict[str, int]
    """Counts by state."""
    evals: tuple[EvalPoint, ...] = ()
    counters: dict[str, float] = {}
    """fenced, closed, duplicates, late, retries, loop lag and so on."""
    added: tuple[AddedPolicy, ...] = ()
    """Policies that are not of the recipe."""


class Event(Record, frozen=True, kw_only=True):
    id: int
    at_s: float
    kind: str
    data: dict[str, Any] = {}


class PublishRequest(Record, frozen=True, kw_only=True):
    """The next version of a policy that is a moving average; its trainer makes them without batches."""

    policy: str
    manifest: Manifest
    of_version: int
    """Newest version of the averaged policy that is in it."""


class PublishReply(Record, frozen=True, kw_only=True):
    serial: int
    finished: bool = False


class EventsRequest(Record, frozen=True, kw_only=True):
    after: int = 0
    limit: int = 1000


class EventsReply(Record, frozen=True, kw_only=True):
    events: tuple[Event, ...] = ()


class OperatorRequest(Record, frozen=True, kw_only=True):
    """``stop`` (with the first cause), ``drain`` (a worker), ``rollback`` (a policy to a version), ``freeze`` and
    ``unfreeze`` (a policy), ``swap`` (a frozen policy plays with a version of ``source``), ``cast`` (a policy plays
    ``role``) or ``add`` (a policy begins with a version of ``source``, or with ``manifest``, and plays ``role``)."""

    action: str
    worker: str | None = None
    policy: str | None = None
    version: int | None = None
    error: str | None = None
    source: str | None = None
    """Of ``swap`` and ``add``: whose version; None: the policy's own."""
    role: str | None = None
    frozen: bool = False
    """Of ``add``: it plays and is not trained."""
    decay: float | None = None
    """Of ``add``: it is the moving average of ``source``, which keeps so much of itself with every version."""
    manifest: Manifest | None = None
    """Of ``add``: weights that are in the store; None: those of ``source``."""


class Done(Record, frozen=True, kw_only=True):
    """Acknowledged."""
