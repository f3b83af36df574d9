"""Leases by measured speed against oldest first, in a pool of workers at 100, 60 and 30 % with long-tailed tasks.

In virtual time, with the real dataflow, ledger and ``assign``; workers only wait as long as their episodes last, so
that nothing but who got which episode differs. Lengths are log-normal by task and, less, by episode.

    tokens_per_s    sampled tokens that were trained, a second
    stale_episodes  begun for groups of which nothing could be trained any more
"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from astraflow.algorithms.credit import GroupMean
from astraflow.algorithms.curate import Shuffled
from astraflow.algorithms.pace import BoundedStaleness
from astraflow.algorithms.pipeline import Pipeline
from astraflow.algorithms.select import EarliestDeadline
from astraflow.dataflow.local import LocalDataflow
from astraflow.dataflow.service import DataflowService
from astraflow.dataflow.settings import Limits, PolicySpec, RunSpec
from astraflow.errors import Closed
from astraflow.tasks.generated import GeneratedTasks
from astraflow.tasks.lists import ListTasks
from astraflow.testing.virtual_clock import VirtualClock
from astraflow.testing.virtual_loop import run_virtual
from astraflow.types import Episode, Lease, Manifest, Outcome, Sample, Span, Task, Trajectory, Turn, WeightFile
from astraflow.wire import messages as m

SPEEDS = {"fast": 1.0, "middle": 0.6, "slow": 0.3}
TOKENS_PER_S = 100.0
"""Of one slot at full speed."""
SLOTS = 8
MEDIAN, BY_TASK, BY_EPISODE = 200, 0.8, 0.3
"""Tokens, and the sigmas of the two log-normals: a task in a hundred is six times as long as the median."""
GROUPS, SIZE, MAX_STALENESS = 4, 4, 4
STEP_S, BEAT_S = 1.0, 2.0
TASKS = 64
"""That come again and again, so that their lengths become known."""
POLICY = "p"


def main(seed: int = 0) -> dict[str, Any]:
    return {
        "virtual_time": True,
        "known_tasks": compare(Plan(seed=seed)),
        "new_tasks": compare(Plan(seed=seed, tasks=None)),
    }


def compare(plan: Plan) -> dict[str, Any]:
    found = {
        name: run_virtual(lambda measured=measured: play(plan, measured=measured), limit_s=1e7)  # type: ignore[misc]
        for name, measured in (("measured", True), ("oldest_first", False))
    }
    ratios = {
        f"{name}_ratio": found["measured"][name] / max(1e-9, found["oldest_first"][name])
        for name in ("tokens_per_s", "stale_episodes")
    }
    return {**found, **ratios}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One workload."""

    seed: int = 0
    steps: int = 100
    """After which it is looked at; the run would go on, so that nobody waits for its last episodes."""
    tasks: int | None = TASKS
    """None: none ever comes twice."""

    def spec(self) -> RunSpec:
        name = "numbers"
        source = (
            GeneratedTasks(name, lambda index: Task(key=str(index)))
            if self.tasks is None
            else ListTasks(name, [Task(key=str(index), dataset=name) for index in range(self.tasks)])
        )
        return RunSpec(
            run="assign",
            seed=self.seed,
            steps=10 * self.steps,
            policies={POLICY: PolicySpec(max_staleness=MAX_STALENESS, groups_per_batch=GROUPS)},
            roles={POLICY: POLICY},
            pipeline=Pipeline(
                curate=Shuffled(source, group_size=SIZE, seed=self.seed),
                pace=BoundedStaleness(),
                credit=GroupMean(),
                select=EarliestDeadline(),
            ),
            limits=Limits(time_limit_s=1e5, dead_after_s=1e6, lease_ttl_s=1e6),
        )

    def length(self, lease: Lease) -> int:
        """The same whoever plays it."""
        task = random.Random(f"{self.seed}/{lease.task.key}").gauss(0.0, BY_TASK)
        own = random.Random(f"{self.seed}/{lease.task.key}/{lease.group}/{lease.index}").gauss(0.0, BY_EPISODE)
        return max(4, round(MEDIAN * math.exp(task + own)))


async def play(plan: Plan, *, measured: bool) -> dict[str, Any]:
    """To the last step."""
    with tempfile.TemporaryDirectory(prefix="assign-") as folder:
        clock = VirtualClock(asyncio.get_running_loop())
        service = DataflowService.open(plan.spec(), Path(folder), clock=clock)
        if not measured:
            # Nothing is known of anybody: oldest first.
            service.ledger.speeds.paces = lambda worker: None  # type: ignore[method-assign]
        await service.publish_initial(manifest(0))
        flow = LocalDataflow(service)
        slots = [_slot(plan, flow, name, speed) for name, speed in SPEEDS.items() for _ in range(SLOTS)]
        going_on = [asyncio.ensure_future(each) for each in (service.run(), *slots)]
        await _train(flow, plan.steps)
        for each in going_on:
            each.cancel()
        await asyncio.wait(going_on)
        found = _figures(service, clock.monotonic())
        await service.close()
        return found


def manifest(version: int) -> Manifest:
    digest = f"{version:064x}"
    file = WeightFile(name="w", sha256=digest, size_bytes=1)
    return Manifest(policy=POLICY, version=version, digest=digest, files=(file,))


async def _slot(plan: Plan, flow: LocalDataflow, name: str, speed: float) -> None:
    """One episode after the other, each by the weights that were the newest when it began."""
    ask = m.LeaseRequest(
        worker=name, incarnation=name, count=1, capabilities=m.Capabilities(policies=(POLICY,)), wait_s=5.0
    )
    while True:
        reply = await flow.lease(ask)
        for lease in reply.leases:
            length = plan.length(lease)
            if not await _plays(flow, name, lease, length / TOKENS_PER_S / speed):
                continue
            with suppress(Closed):  # its group was given up since the last heartbeat
                await flow.submit(
                    m.SubmitRequest(
                        worker=name,
                        group=lease.group,
                        index=lease.index,
                        attempt=lease.attempt,
                        episode=_episode(lease, length, reply.manifests[POLICY]),
                    )
                )


async def _plays(flow: LocalDataflow, name: str, lease: Lease, seconds: float) -> bool:
    """Whether to the end: of a group of which nothing can be trained any more a worker hears with its heartbeat."""
    report = m.ComponentReport(doing="playing", versions={POLICY: 0})
    beat = m.RenewRequest(worker=name, incarnation=name, held=(lease.id,), report=report)
    while seconds > 0:
        if (await flow.renew(beat)).lost:
            return False
        await asyncio.sleep(min(BEAT_S, seconds))
        seconds -= BEAT_S
    return True


def _episode(lease: Lease, length: int, weights: Manifest) -> Episode:
    tokens = np.arange(length + 2, dtype=np.int32)
    sample = Sample(
        tokens=tokens,
        sampled=tokens >= 2,
        logprobs=np.where(tokens >= 2, np.float32(-1), np.float32(0)).astype(np.float32),
        spans=(Span(start=2, stop=length + 2, version=weights.version, digest=weights.digest),),
    )
    reward = float(lease.index % 2)
    turn = Turn(index=0, sample=0, start=2, stop=length + 2, reward=reward)
    played = Trajectory(agent=POLICY, role=POLICY, policy=POLICY, samples=(sample,), turns=(turn,))
    return Episode(task_key=lease.task.key, outcome=Outcome.COMPLETED, score=reward, trajectories=(played,))


async def _train(flow: LocalDataflow, steps: int) -> None:
    epoch = (
        await flow.resume(
            m.ResumeRequest(policy=POLICY, version=0, digest=manifest(0).digest, trainer="t", incarnation="t")
        )
    ).trainer_epoch
    while steps:
        reply = await flow.batch(m.BatchRequest(policy=POLICY, trainer_epoch=epoch, wait_s=60.0))
        if reply.batch is not None:
            await asyncio.sleep(STEP_S)
            made = manifest(reply.batch.version + 1)
            await flow.commit(m.CommitRequest(policy=POLICY, batch=reply.batch.id, trainer_epoch=epoch, manifest=made))
            steps -= 1


def _figures(service: DataflowService, wall_s: float) -> dict[str, Any]:
    db = service.ledger.store
    tokens: Counter[str] = Counter()
    for state, masked, count in db.all("SELECT state, mask, SUM(tokens) FROM samples GROUP BY state, mask"):
        tokens["stale" if state == "stale" or masked == "stale" else state] += count
    trained: dict[str, int] = dict(
        db.all(
            "SELECT e.worker, COUNT(*) FROM samples s JOIN episodes e ON e.group_id = s.group_id AND e.idx = s.idx "
            "WHERE s.state = 'trained' GROUP BY e.worker"
        )
    )
    lost = "SELECT COUNT(*) FROM episodes e JOIN group_policy p ON p.group_id = e.group_id WHERE p.state = 'stale'"
    return {
        "wall_s": round(wall_s, 1),
        "tokens_per_s": tokens["trained"] / wall_s,
        "episodes_per_s": sum(trained.values()) / wall_s,
        "stale_groups": db.number("SELECT COUNT(*) FROM group_policy WHERE state = 'stale'"),
        "stale_episodes": db.number(lost),
        "trained_by": {name: trained.get(name, 0) for name in SPEEDS},
    }
