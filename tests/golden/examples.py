"""One of every record on the wire, no field at its default where that says anything. Golden files are made of these."""

from __future__ import annotations

import numpy as np

from astraflow import types as t
from astraflow.types import Record
from astraflow.wire import messages as m
from astraflow.wire.calls import WireError

DIGEST = "0123456789abcdef" * 4
SPAN = t.Span(start=2, stop=5, version=7, digest=DIGEST)
SAMPLE = t.Sample(
    tokens=np.array([1, 151645, 3, 4, 5, 6], np.int32),
    sampled=np.array([0, 0, 1, 1, 1, 0], np.bool_),
    logprobs=np.array([0, 0, -0.1, -1.234567e-07, -30.5, 0], np.float32),
    spans=(SPAN,),
)
TURN = t.Turn(
    index=3, sample=0, start=2, stop=5, stop_reason=t.StopReason.LENGTH, parent=1, reward=-0.5, baseline_key="solver/2"
)
TRAJECTORY = t.Trajectory(agent="solver#2", role="solver", policy="p", samples=(SAMPLE,), turns=(TURN,))
EPISODE = t.Episode(
    task_key="k/1",
    outcome=t.Outcome.TRUNCATED,
    trajectories=(TRAJECTORY,),
    score=0.25,
    features={"content_hash": np.array([2**63 + 1], np.uint64), "empty": np.zeros((0, 3), np.float16)},
    metrics={"turns": 4.0},
    wall_s=1.5,
)
TASK = t.Task(
    key="k/1",
    dataset="d",
    payload={"text": "größer", "seed": 2**63 - 1, "bytes": b"\x00\xff", "map": {1: "a"}, "none": None, "list": [True]},
    workflow="w:W",
    features={"difficulty": np.array([[0.5, 1.5]], np.float64)},
)
FILE = t.WeightFile(name="model.safetensors", sha256=DIGEST, size_bytes=2**40)
DELTA = t.WeightDelta(base_digest="a" * 64, digest=DIGEST, file=FILE)
PROMPT = t.CanaryPrompt(text="2 + 2?", tokens=(1, 70000), reply=(5, 6), logprobs=(-0.25, -1.5), cold=True)
CANARY = t.Canary(dtype="float32", prompts=(PROMPT,))
MANIFEST = t.Manifest(
    policy="p",
    version=7,
    digest=DIGEST,
    files=(FILE,),
    files_digest="b" * 64,
    deltas=(DELTA,),
    base_digest="f" * 64,
    serial=9,
    trainer_epoch=2,
    canary=CANARY,
    form="d" * 64,
)
ADDED = m.AddedPolicy(name="q", like="p", trainable=False, average_of="p", decay=0.5, since=12)
LEASE = t.Lease(
    group=12,
    index=3,
    attempt=2,
    task=TASK,
    purpose=t.Purpose.EVAL,
    seed=2**63 - 1,
    ttl_s=10.5,
    time_limit_s=60.0,
    versions={"p": 0},
    version_choice=0.5,
    roles={"solver": "p"},
)
RUN = t.AdvantageRun(start=2, stop=5, value=-1.25)
ROW = t.Row(
    sample_id="12/3/solver/0",
    use=1,
    tokens=SAMPLE.tokens,
    mask=SAMPLE.sampled,
    logprobs=SAMPLE.logprobs,
    spans=(SPAN,),
    advantages=(RUN,),
    kind=t.SampleKind.SUPERVISED,
    pair="pair-1",
)
BATCH = t.Batch(id=5, policy="p", version=7, trainer_epoch=2, tokens=3, sequences=1, rows=(ROW,))
CAPABILITIES = m.Capabilities(
    policies=("p", "q"),
    supervised=False,
    code_digest="c",
    config_digest="d",
    dtype="bf16",
    max_context=2048,
    versions_held=2,
)
REPORT = m.ComponentReport(
    doing="lease", since_s=1.25, why="no_task", versions={"p": 7}, pulling={"p": 9}, metrics={"tokens/s": 1e3},
    error="disk full",
    region="eu", relay="http://10.0.0.7:7000",
)  # fmt: skip
RELAY = m.RelayPlace(worker="w2", incarnation="b2", url="https://10.0.0.8:7001", region="eu")
POOL_WORKER = m.PoolWorker(
    name="w1", state="alive", region="eu", relay="http://10.0.0.7:7000", heard_s=0.5, versions={"p": 7}, lag={"p": 1},
    tokens_per_s=1250.0, episodes_per_s=0.75, held=4, staleness={"0": 5, "1": 2}, reason="waits for weights",
    metrics={"weights/bytes/relay": 1e9},
)  # fmt: skip
TARGET = m.PoolTarget(
    workers=4, target=6, action="grow", reason="the trainer waits 30% of its time", wait=0.3, consumed_per_s=2.0,
    produced_per_s=2.5, span_s=120.0,
)  # fmt: skip
COMPONENT = m.ComponentStatus(component="rollout", name="w1", state="alive", heard_s=0.5, report=REPORT, held=4)
POLICY = m.PolicyStatus(
    policy="p",
    trainable=True,
    version=7,
    steps=100,
    groups={"open": 2, "dropped/zero_variance": 1},
    staleness={"0": 5},
    waits="5/8 groups",
    frozen=True,
)
EVAL = m.EvalPoint(
    policy="p", version=7, digest=DIGEST, dataset="held-out", score=0.75, coverage=0.99, episodes=200, at_s=12.5,
    pass_at={"1": 0.75, "2": 0.875},
)  # fmt: skip
EVENT = m.Event(id=2**40, at_s=3.5, kind="lease", data={"group": 12, "worker": "w1"})

_EXAMPLES: tuple[Record, ...] = (
    SPAN,
    SAMPLE,
    TURN,
    TRAJECTORY,
    EPISODE,
    TASK,
    FILE,
    DELTA,
    PROMPT,
    CANARY,
    MANIFEST,
    LEASE,
    RUN,
    ROW,
    BATCH,
    CAPABILITIES,
    REPORT,
    COMPONENT,
    POLICY,
    EVAL,
    EVENT,
    t.Sampling(max_tokens=9, temperature=0.5, top_p=0.25, top_k=3, stop=("\n",), stop_token_ids=(2,), seed=2**63 - 1),
    m.HelloRequest(
        component="trainer",
        name="t",
        incarnation="a1",
        config_digest="c",
        code_digest="d",
        policy="p",
        config={"steps": "4"},
    ),
    m.HelloReply(run="run-1", config_digest="c", heartbeat_s=2.0, dead_after_s=10.0),
    m.LeaseRequest(worker="w1", incarnation="a1", count=4, capabilities=CAPABILITIES, wait_s=5.0),
    m.LeaseReply(leases=(LEASE,), manifests={"p": MANIFEST}, reason="no_room", finished=True),
    m.RenewRequest(worker="w1", incarnation="a1", held=("12/3/2",), report=REPORT),
    m.RenewReply(
        lost=("12/3/2",), manifests={"p": MANIFEST}, drain=True, finished=True, relays=(RELAY,), added=(ADDED,)
    ),
    RELAY,
    POOL_WORKER,
    TARGET,
    m.PoolReply(run="run-1", state="running", workers=(POOL_WORKER,), target=TARGET),
    m.SubmitRequest(worker="w1", group=12, index=3, attempt=2, episode=EPISODE),
    m.SubmitReply(duplicate=True, group_closed=True),
    m.SubmitManyRequest(requests=(b"\x80", b"")),
    m.SubmitAnswer(reply=m.SubmitReply(duplicate=True), kind="Fenced", message="attempt 3 exists"),
    m.SubmitManyReply(answers=(m.SubmitAnswer(reply=m.SubmitReply()), m.SubmitAnswer(kind="Closed", message="over"))),
    m.HandBackRequest(worker="w1", held=("12/3/2", "12/4/1")),
    m.ResumeRequest(policy="p", version=7, digest=DIGEST, trainer="t", incarnation="a1", manifest=MANIFEST),
    m.ResumeReply(trainer_epoch=2, undone=(5, 6), steps=100, finished=True),
    m.BatchRequest(policy="p", trainer_epoch=2, wait_s=5.0, report=REPORT),
    m.BatchReply(batch=BATCH, reason="no_ready", why="5/8 groups", finished=True),
    m.CommitRequest(
        policy="p",
        batch=5,
        trainer_epoch=2,
        manifest=MANIFEST,
        reason="no_signal",
        metrics={"loss": 0.5},
        oldest_checkpoint=4,
    ),
    m.CommitReply(version=8, duplicate=True, finished=True),
    m.FailRequest(policy="p", batch=5, failures=1, trainer_epoch=2, error="out of memory"),
    m.FailReply(failures=3, stop=True),
    m.ReportRequest(component="trainer", name="t", incarnation="a1", report=REPORT, leaving=True),
    m.ManifestRequest(policy="p", version=0),
    m.StatusReply(
        run="run-1",
        state="failed",
        error="disk full",
        now_s=12.5,
        policies=(POLICY,),
        components=(COMPONENT,),
        episodes={"pending": 3},
        evals=(EVAL,),
        counters={"fenced": 1.0},
        added=(ADDED,),
    ),
    m.EventsRequest(after=5, limit=10),
    m.EventsReply(events=(EVENT,)),
    m.OperatorRequest(
        action="rollback",
        worker="w1",
        policy="p",
        version=3,
        error="cause",
        role="solver",
        frozen=True,
        decay=0.5,
        manifest=MANIFEST,
    ),
    ADDED,
    m.PublishRequest(policy="p", manifest=MANIFEST, of_version=7),
    m.PublishReply(serial=8, finished=True),
    m.Done(),
    WireError(kind="Fenced", message="a newer attempt exists"),
)
EXAMPLES = {type(example).__name__: example for example in _EXAMPLES}
