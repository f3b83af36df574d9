"""A real dataflow service on a real ledger, with a clock that moves when told to, and hands to play with it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from astraflow.algorithms.credit import GroupMean
from astraflow.algorithms.curate import Shuffled
from astraflow.algorithms.keep import DropZeroVariance
from astraflow.algorithms.pace import BoundedStaleness
from astraflow.algorithms.pipeline import Pipeline
from astraflow.algorithms.select import EarliestDeadline
from astraflow.dataflow.conservation import balance
from astraflow.dataflow.ledger import Ledger
from astraflow.dataflow.local import LocalDataflow
from astraflow.dataflow.service import DataflowService
from astraflow.dataflow.settings import EvalSpec, Limits, PolicySpec, RunSpec
from astraflow.dataflow.store import connect
from astraflow.dataflow.sweeps import deaf_after_s
from astraflow.tasks.lists import ListTasks
from astraflow.testing.virtual_clock import ManualClock
from astraflow.types import (
    Batch,
    Episode,
    FailureKind,
    Lease,
    Manifest,
    Outcome,
    Sample,
    SampleKind,
    Span,
    Task,
    Trajectory,
    Turn,
    WeightFile,
)
from astraflow.wire import messages as m

T = TypeVar("T")
_NAMES = itertools.count()


def tasks(count: int = 50, *, workflow: str = "", name: str = "tasks") -> ListTasks:
    return ListTasks(name, [Task(key=f"{name}-{i}", dataset=name, workflow=workflow) for i in range(count)])


def pipeline(*, group_size: int = 2, keep: Sequence[Any] = (), source: Any = None, **parts: Any) -> Pipeline:
    chosen: dict[str, Any] = {
        "curate": Shuffled(source or tasks(), group_size=group_size),
        "pace": BoundedStaleness(),
        "credit": GroupMean(),
        "select": EarliestDeadline(),
        **parts,
    }
    return Pipeline(keep=tuple(keep), **chosen)


def make_spec(
    *,
    steps: int = 3,
    policies: dict[str, PolicySpec] | None = None,
    roles: dict[str, str] | None = None,
    max_staleness: int = 1,
    groups_per_batch: int = 2,
    group_size: int = 2,
    limits: Limits | None = None,
    evals: EvalSpec | None = None,
    **parts: Any,
) -> RunSpec:
    named = policies or {"p": PolicySpec(max_staleness=max_staleness, groups_per_batch=groups_per_batch)}
    return RunSpec(
        run="r",
        seed=7,
        steps=steps,
        policies=named,
        roles=roles or {f"role_{name}": name for name in named},
        pipeline=pipeline(group_size=group_size, **parts),
        limits=limits or Limits(),
        eval=evals,
    )


def manifest(policy: str = "p", version: int = 0, *, salt: str = "", form: str = "") -> Manifest:
    digest = f"{policy}-{version}-{salt}".ljust(64, "0")
    return Manifest(
        policy=policy,
        version=version,
        digest=digest,
        files=(WeightFile(name="w", sha256=digest, size_bytes=1),),
        form=form,
    )


def sample(spans: Sequence[tuple[int, str]] = ((0, "d"),), *, length: int = 2, prompt: int = 2) -> Sample:
    """A prompt, then ``length`` tokens from each (version, digest) in turn."""
    total = prompt + length * len(spans)
    sampled = np.arange(total) >= prompt
    return Sample(
        tokens=np.arange(total, dtype=np.int32),
        sampled=sampled,
        logprobs=np.where(sampled, np.float32(-0.5), np.float32(0)).astype(np.float32),
        spans=tuple(
            Span(start=prompt + i * length, stop=prompt + (i + 1) * length, version=version, digest=digest)
            for i, (version, digest) in enumerate(spans)
        ),
    )


class Rig:
    """Synchronous hands: each call runs the loop until it is answered."""

    def __init__(self, spec: RunSpec | None = None, *, folder: Path | None = None, publish: bool = True) -> None:
        self.make = (lambda: spec) if spec is not None else make_spec
        self.runner = asyncio.Runner()
        self.clock = ManualClock()
        self.folder = folder
        self.uri = f"file:rig-{next(_NAMES)}?mode=memory&cache=shared"
        self.keeper = connect(self.uri) if folder is None else None
        self.service = self._open(spec or make_spec())
        if publish:
            for name in self.service.spec.policies:
                self.go(self.service.publish_initial(manifest(name)))

    def _open(self, spec: RunSpec) -> DataflowService:
        self.spec = spec

        async def opened() -> DataflowService:
            if self.folder is not None:
                return DataflowService.open(spec, self.folder, clock=self.clock)
            return DataflowService(spec, Ledger(connect(self.uri), spec), clock=self.clock)

        return self.runner.run(opened())

    def restart(self, spec: RunSpec | None = None) -> None:
        """The process dies and another one starts on the same file; monotonic time begins anew."""
        self.go(self.service.close())
        self.clock = ManualClock(1000.0)
        self.service = self._open(spec or self.spec)

    def close(self) -> None:
        self.go(self.service.close())
        if self.keeper is not None:
            self.keeper.close()
        self.runner.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def go(self, call: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(10):
                answer = await call
                await asyncio.sleep(0)  # what the call set off: settling
                return answer

        return self.runner.run(bounded())

    @property
    def flow(self) -> LocalDataflow:
        return LocalDataflow(self.service)

    @property
    def db(self) -> Any:
        return self.service.ledger.store

    def states(self, table: str) -> dict[str, int]:
        return dict(self.db.all(f"SELECT state, COUNT(*) FROM {table} GROUP BY state"))

    def group(self, group: int, policy: str = "p") -> tuple[str, str | None]:
        return self.db.one("SELECT state, reason FROM group_policy WHERE group_id = ? AND policy = ?", group, policy)

    def balanced(self) -> None:
        found = balance(self.service.ledger.store.connection)
        assert found["difference"] == 0, found

    def advance(self, seconds: float) -> None:
        """Time passes, and dataflow looks often enough not to be deaf."""
        step, left = deaf_after_s(self.service.spec.limits), seconds
        while left > step:
            self.pause(step)
            left -= step
        self.pause(left)

    def pause(self, seconds: float) -> None:
        """Dataflow is stopped for so long; then it looks."""
        self.clock.advance(seconds)
        self.go(self.service.tick())

    # ── a worker's hands ──

    def lease(
        self,
        count: int = 1,
        *,
        worker: str = "w",
        incarnation: str = "",
        policies: Sequence[str] | None = None,
        wait_s: float = 0.0,
    ) -> m.LeaseReply:
        return self.go(
            self.flow.lease(
                m.LeaseRequest(
                    worker=worker,
                    incarnation=incarnation or worker,
                    count=count,
                    capabilities=m.Capabilities(
                        policies=tuple(policies or self.service.ledger.policies.specs),
                        config_digest=self.service.spec.config_digest,
                        code_digest=self.service.spec.code_digest,
                    ),
                    wait_s=wait_s,
                )
            )
        )

    def leases(self, count: int = 1, *, worker: str = "w") -> tuple[Lease, ...]:
        found = self.lease(count, worker=worker).leases
        assert len(found) == count, f"wanted {count} leases, found {len(found)}"
        return found

    def renew(self, held: Sequence[Lease] = (), *, worker: str = "w", incarnation: str = "") -> m.RenewReply:
        return self.go(
            self.flow.renew(
                m.RenewRequest(worker=worker, incarnation=incarnation or worker, held=tuple(x.id for x in held))
            )
        )

    def digest(self, policy: str) -> tuple[int, str]:
        newest = self.service.ledger.policies.newest[policy]
        return newest.version, newest.digest

    def episode(
        self, lease: Lease, reward: float | None = 1.0, *, spans: Sequence[tuple[int, str]] | None = None
    ) -> Episode:
        """One turn of every role, each with this reward; by the newest weights unless told."""
        return Episode(
            task_key=lease.task.key,
            outcome=Outcome.COMPLETED,
            score=reward,
            trajectories=tuple(
                Trajectory(
                    agent=role,
                    role=role,
                    policy=policy,
                    samples=(self._sample(policy, spans),),
                    turns=(Turn(index=0, sample=0, start=2, stop=2 + 2 * len(spans or "1"), reward=reward),),
                )
                for role, policy in (lease.roles or self.spec.roles).items()
            ),
        )

    def _sample(self, policy: str, spans: Sequence[tuple[int, str]] | None) -> Sample:
        return sample([self.digest(policy)] if spans is None else spans)

    def submit(
        self, lease: Lease, reward: float | None = 1.0, *, episode: Episode | None = None, worker: str | None = None
    ) -> m.SubmitReply:
        """``worker``: None is who has the lease."""
        if worker is None:
            row = self.db.one("SELECT worker FROM episodes WHERE group_id = ? AND idx = ?", lease.group, lease.index)
            worker = row[0] if row and row[0] else "w"
        return self.go(
            self.flow.submit(
                m.SubmitRequest(
                    worker=worker,
                    group=lease.group,
                    index=lease.index,
                    attempt=lease.attempt,
                    episode=self.episode(lease, reward) if episode is None else episode,
                )
            )
        )

    def submit_failed(self, lease: Lease, kind: FailureKind = FailureKind.INFRA) -> m.SubmitReply:
        episode = Episode(task_key=lease.task.key, outcome=Outcome.FAILED, failure=kind, error="boom")
        return self.submit(lease, episode=episode)

    def play_groups(self, count: int, *, size: int = 2, worker: str = "w") -> list[int]:
        """Whole groups to the end, rewards 0 and 1 in turn; returns their ids."""
        played = []
        for lease in self.leases(count * size, worker=worker):
            self.submit(lease, float(lease.index % 2), worker=worker)
            played.append(lease.group)
        return sorted(set(played))

    # ── a trainer's hands ──

    def resume(self, policy: str = "p", version: int | None = None, *, incarnation: str = "t", salt: str = "") -> int:
        at = self.digest(policy)[0] if version is None else version
        digest = self.digest(policy)[1] if version is None else manifest(policy, at, salt=salt).digest
        return self.resume_at(policy, at, digest, incarnation=incarnation).trainer_epoch

    def resume_at(self, policy: str, version: int, digest: str, *, incarnation: str = "t") -> m.ResumeReply:
        return self.go(
            self.flow.resume(
                m.ResumeRequest(
                    policy=policy, version=version, digest=digest, trainer=f"t-{policy}", incarnation=incarnation
                )
            )
        )

    def digest_at(self, version: int, policy: str = "p") -> str:
        """Of the newest publication of a version."""
        return self.service.ledger.policies.manifest(policy, version).digest

    def roll_back(self, version: int, policy: str = "p") -> None:
        self.go(self.flow.operate(m.OperatorRequest(action="rollback", policy=policy, version=version)))

    def batch(self, epoch: int, policy: str = "p") -> m.BatchReply:
        return self.go(self.flow.batch(m.BatchRequest(policy=policy, trainer_epoch=epoch)))

    def take(self, epoch: int, policy: str = "p") -> Batch:
        reply = self.batch(epoch, policy)
        assert reply.batch is not None, reply
        return reply.batch

    def commit(
        self, batch: Batch, *, salt: str = "", reason: str | None = None, oldest: int | None = None
    ) -> m.CommitReply:
        made = None if reason else manifest(batch.policy, batch.version + 1, salt=salt)
        return self.go(
            self.flow.commit(
                m.CommitRequest(
                    policy=batch.policy,
                    batch=batch.id,
                    trainer_epoch=batch.trainer_epoch,
                    manifest=made,
                    reason=reason,
                    oldest_checkpoint=oldest,
                )
            )
        )

    def step(self, epoch: int, policy: str = "p", *, oldest: int | None = None) -> Batch:
        """Play what a batch needs, take it and commit it, saying which checkpoint is the oldest."""
        need = self.spec.policies[policy].groups_per_batch
        self.play_groups(need)
        batch = self.take(epoch, policy)
        self.commit(batch, oldest=oldest)
        return batch


def supervised_episode(lease: Lease, policy: str = "p") -> Episode:
    tokens = np.arange(5, dtype=np.int32)
    return Episode(
        task_key=lease.task.key,
        outcome=Outcome.COMPLETED,
        trajectories=(
            Trajectory(
                agent="supervised",
                role="supervised",
                policy=policy,
                samples=(
                    Sample(
                        tokens=tokens,
                        sampled=tokens >= 3,
                        logprobs=np.zeros(5, np.float32),
                        kind=SampleKind.SUPERVISED,
                    ),
                ),
            ),
        ),
    )


KEEP = DropZeroVariance
