"""The load of the dataflow bench: workers that lease, submit and forget, a trainer that takes and commits.

It needs only the protocol ``Dataflow``: the same load runs in process (to record statements) and over HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from astraflow.algorithms.credit import GroupMean
from astraflow.algorithms.curate import Shuffled
from astraflow.algorithms.keep import DropZeroVariance
from astraflow.algorithms.pace import BoundedStaleness
from astraflow.algorithms.pipeline import Pipeline
from astraflow.algorithms.select import EarliestDeadline
from astraflow.dataflow.settings import PolicySpec, RunSpec
from astraflow.errors import RunFailed
from astraflow.tasks.lists import ListTasks
from astraflow.types import Array, Episode, Lease, Manifest, Outcome, Sample, Span, Task, Trajectory, Turn, WeightFile
from astraflow.wire import messages as m

TOKENS, PROMPT = 1000, 100
GROUP, GROUPS_PER_BATCH = 8, 8
PER_BATCH = GROUP * GROUPS_PER_BATCH
POLICY, ROLE = "p", "player"
WORKERS, LEASES = 4, 16
"""Workers of the load, and how many episodes each leases and submits at once."""
CHECKPOINTS = 3
"""One after every step, the last three kept: what is older may be pruned."""
POOL = 256
"""Different samples; each is sent again and again, nothing on the way compares them."""
WAIT_S = 10.0


class Rollouts(Protocol):
    """What the workers call."""

    async def lease(self, request: m.LeaseRequest) -> m.LeaseReply: ...
    async def submit(self, request: m.SubmitRequest) -> m.SubmitReply: ...


class Training(Protocol):
    """What the trainer calls."""

    async def resume(self, request: m.ResumeRequest) -> m.ResumeReply: ...
    async def batch(self, request: m.BatchRequest) -> m.BatchReply: ...
    async def commit(self, request: m.CommitRequest) -> m.CommitReply: ...


def make_spec(steps: int) -> RunSpec:
    """One policy, groups of 8, 8 groups a batch; room for nine batches, so that the trainer is never the brake."""
    tasks = ListTasks("bench", [Task(key=f"t{n}", payload={"question": f"question {n}"}) for n in range(1000)])
    return RunSpec(
        run="bench",
        steps=steps,
        policies={POLICY: PolicySpec(max_staleness=8, groups_per_batch=GROUPS_PER_BATCH)},
        roles={ROLE: POLICY},
        pipeline=Pipeline(
            curate=Shuffled(tasks, group_size=GROUP),
            pace=BoundedStaleness(),
            credit=GroupMean(),
            keep=(DropZeroVariance(),),
            select=EarliestDeadline(),
        ),
    )


def manifest(version: int) -> Manifest:
    digest = hashlib.sha256(f"weights {version}".encode()).hexdigest()
    file = WeightFile(name="model.safetensors", sha256=digest, size_bytes=1)
    return Manifest(policy=POLICY, version=version, digest=digest, files=(file,))


@dataclass(slots=True, repr=False)
class Load:
    """Plays a run of ``steps`` batches to its end."""

    rollouts: Rollouts
    training: Training
    steps: int
    seed: int = 0
    lease_s: list[float] = field(default_factory=list)
    """Seconds of every lease call that asked for work without waiting for any."""
    trained: int = 0
    """Trajectories whose bytes were delivered and whose step was committed."""
    took_s: float = 0.0
    _sampled: Array = field(init=False)
    _tokens: list[Array] = field(default_factory=list)
    _logprobs: list[Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        self._sampled = np.arange(TOKENS) >= PROMPT
        for _ in range(POOL):
            self._tokens.append(random.integers(0, 2**31, TOKENS).astype(np.int32))
            values = -random.exponential(1.0, TOKENS).astype(np.float32)
            self._logprobs.append(np.where(self._sampled, values, np.float32(0)))

    async def run(self) -> None:
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for number in range(WORKERS):
                tasks.create_task(self._work(f"w{number}"))
            tasks.create_task(self._train())
        self.took_s = time.perf_counter() - began

    # ── a worker ──

    async def _work(self, name: str) -> None:
        wait_s = 0.0
        while True:
            began = time.perf_counter()
            reply = await self.rollouts.lease(
                m.LeaseRequest(
                    worker=name,
                    incarnation=name,
                    count=LEASES,
                    capabilities=m.Capabilities(policies=(POLICY,)),
                    wait_s=wait_s,
                )
            )
            if wait_s == 0.0:
                self.lease_s.append(time.perf_counter() - began)
            if reply.finished:
                return
            wait_s = 0.0 if reply.leases else WAIT_S
            newest = reply.manifests[POLICY]
            await self._submit(name, reply.leases, newest)

    async def _submit(self, name: str, leases: Sequence[Lease], newest: Manifest) -> None:
        requests = [
            m.SubmitRequest(
                worker=name,
                group=lease.group,
                index=lease.index,
                attempt=lease.attempt,
                episode=self._episode(lease, newest),
            )
            for lease in leases
        ]
        await asyncio.gather(*(self.rollouts.submit(request) for request in requests))

    def _episode(self, lease: Lease, newest: Manifest) -> Episode:
        """Rewards differ within every group: all of them are kept."""
        reward = float(lease.index % 2)
        which = (lease.group * GROUP + lease.index) % POOL
        sample = Sample(
            tokens=self._tokens[which],
            sampled=self._sampled,
            logprobs=self._logprobs[which],
            spans=(Span(start=PROMPT, stop=TOKENS, version=newest.version, digest=newest.digest),),
        )
        turn = Turn(index=0, sample=0, start=PROMPT, stop=TOKENS, reward=reward)
        player = Trajectory(agent=ROLE, role=ROLE, policy=POLICY, samples=(sample,), turns=(turn,))
        return Episode(task_key=lease.task.key, outcome=Outcome.COMPLETED, score=reward, trajectories=(player,))

    # ── the trainer ──

    async def _train(self) -> None:
        first = manifest(0)
        resumed = await self.training.resume(
            m.ResumeRequest(policy=POLICY, version=0, digest=first.digest, trainer="t", incarnation="t")
        )
        epoch = resumed.trainer_epoch
        while True:
            reply = await self.training.batch(m.BatchRequest(policy=POLICY, trainer_epoch=epoch, wait_s=WAIT_S))
            if reply.finished:
                return
            if reply.batch is None:
                continue
            batch = reply.batch
            if batch.tokens != len(batch.rows) * (TOKENS - PROMPT) or len(batch.rows) != PER_BATCH:
                raise RunFailed(f"batch {batch.id} has {len(batch.rows)} rows of {batch.tokens} trained tokens")
            await self.training.commit(
                m.CommitRequest(
                    policy=POLICY,
                    batch=batch.id,
                    trainer_epoch=epoch,
                    manifest=manifest(batch.version + 1),
                    oldest_checkpoint=max(0, batch.version + 2 - CHECKPOINTS),
                )
            )
            self.trained += len(batch.rows)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
