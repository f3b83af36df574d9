"""One run in one process and one loop, in steps of its own time: for tables that need many runs of a tiny model.

Real: dataflow with its ledger, the pipeline, agents, the embedded engine, the torch backend, weights by file.
Not there: sockets, other processes, waiting. Time is a number that events move:

    free slots ─ lease ─► sampled at once, by the version of now ─► submitted ``episode_s`` later
    a batch    ─────────► stepped at once                        ─► committed and loaded ``step_s`` later

With both 0 each version samples all that it is to sample before the next step. Evaluations take no time and are
no episodes of the run.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from astraflow.algorithms.pipeline import Pipeline
from astraflow.backends.torch_single import TorchBackend
from astraflow.dataflow.local import LocalDataflow
from astraflow.dataflow.service import DataflowService
from astraflow.dataflow.settings import Limits, PolicySpec, RunSpec
from astraflow.engines.settings import EngineSettings
from astraflow.engines.torch_engine import TorchEngine
from astraflow.errors import AstraFlowError, RunFailed
from astraflow.rollout.agents import Seat
from astraflow.rollout.play import WorkflowPlayer
from astraflow.rollout.template import ChatTemplate
from astraflow.run.bench._cells import Cell
from astraflow.run.bench._middle import POLICY, middle, started
from astraflow.tasks.base import TaskSource
from astraflow.testing.virtual_clock import ManualClock
from astraflow.trainer.settings import LossSettings, TrainerSettings
from astraflow.types import Batch, Lease, Manifest, Purpose, Sampling
from astraflow.weights.manifest import weight_files_in
from astraflow.weights.store import weight_file_of
from astraflow.wire import messages as m

WORKER = "rollout-0"
LONG_S = 1e9
"""Of leases and deaths: nobody dies here, and time is not the machine's."""
SAMPLING = Sampling(max_tokens=3)
TURN_S = 0.1
"""The loop asks for everything first, then the decode thread has the interpreter: they take turns, neither is late."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One run."""

    model: Path
    pipeline: Pipeline
    trainer: TrainerSettings
    steps: int
    groups_per_batch: int
    max_staleness: int
    seed: int
    held_out: TaskSource
    eval_every: int
    slots: int = 4096
    """Episodes under way at a time."""
    episode_s: Callable[[Lease], float] = lambda _: 0.0
    step_s: float = 0.0
    limits: Limits = field(
        default_factory=lambda: Limits(lease_ttl_s=LONG_S, dead_after_s=LONG_S, time_limit_s=LONG_S, heartbeat_s=1.0)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One evaluation."""

    version: int
    episodes: int
    """Played to train on, until then."""
    at_s: float
    """Of the run's own time."""
    score: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Aged:
    """One step: versions between it and what sampled its rows, by the ledger."""

    version: int
    youngest: int
    oldest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What became of a run."""

    points: tuple[Point, ...]
    ages: tuple[Aged, ...]
    groups: dict[str, int]
    """How many ended ``trained``, ``stale`` or ``dropped/REASON``."""
    trained: tuple[str, ...]
    """Key of the task of each trained group."""
    masked: dict[str, int]
    """Samples without gradient, by reason."""
    cancelled: int
    """Episodes that were begun in vain: their group went stale before they ended."""
    ended: str
    """Empty: with all its steps. Else the error that ended it."""


class Drive:
    """``await run()`` once."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self._folder = folder
        self._clock = ManualClock()
        self._service = DataflowService.open(_spec(plan), folder / "run", clock=self._clock)
        self._flow = LocalDataflow(self._service)
        slots = EngineSettings(slots=64, threads=1)
        self._engine = TorchEngine(plan.model, POLICY, slots)
        self._backend = TorchBackend(plan.model, plan.trainer, steps=plan.steps)
        seat = Seat(
            policy=POLICY, engine=self._engine, template=ChatTemplate.from_folder(plan.model), sampling=SAMPLING
        )
        self._player = WorkflowPlayer(workflow=middle, seats={POLICY: seat}, clock=self._clock)
        self._due: list[tuple[float, int, m.SubmitRequest | m.CommitRequest, Manifest | None]] = []
        self._order = itertools.count()
        self._held: set[str] = set()
        """Leases under way."""
        self._stepping = False
        self._epoch = 0
        self._finished = False
        self.episodes = 0
        self.cancelled = 0
        self.points: list[Point] = []

    async def run(self) -> Found:
        ended = ""
        try:
            await self._begin()
            while not self._finished:
                await self._turn()
        except AstraFlowError as error:  # starved, or an algorithm's fault: a row of the table, not the end of it
            ended = f"{type(error).__name__}: {error}"
        finally:
            await self._engine.close()
            found = self._found(ended)
            await self._service.close()
        return found

    async def _begin(self) -> None:
        files = weight_files_in(self.plan.model)
        manifest = self._manifest(files, version=0)
        await self._service.publish_initial(manifest)
        await self._engine.start()
        sys.setswitchinterval(TURN_S)
        await self._engine.load(manifest, files)
        await self._flow.hello(m.HelloRequest(component="rollout", name=WORKER, incarnation="0"))
        resume = m.ResumeRequest(
            policy=POLICY, version=0, digest=manifest.digest, trainer=f"trainer-{POLICY}", incarnation="0"
        )
        self._epoch = (await self._flow.resume(resume)).trainer_epoch
        await self._evaluate(0)

    # ── one turn: whatever can be done now, else time passes ──

    async def _turn(self) -> None:
        if await self._lease():
            return
        if self._due and self._due[0][0] <= self._clock.monotonic():
            await self._happen()
        elif await self._step():
            return
        elif self._due:
            self._clock.advance(self._due[0][0] - self._clock.monotonic())
        else:
            status = await self._flow.batch(m.BatchRequest(policy=POLICY, trainer_epoch=self._epoch))
            raise RunFailed(f"nothing is under way and nothing can begin: {status.why}")

    async def _lease(self) -> bool:
        """Fill the free slots; whether there was anything to play."""
        free = self.plan.slots - len(self._held)
        if free <= 0:
            return False
        request = m.LeaseRequest(
            worker=WORKER, incarnation="0", count=free, capabilities=m.Capabilities(policies=(POLICY,)), wait_s=0.0
        )
        leases = (await self._flow.lease(request)).leases
        episodes = await asyncio.gather(*(self._player(lease) for lease in leases))
        now = self._clock.monotonic()
        for lease, episode in zip(leases, episodes, strict=True):
            submit = m.SubmitRequest(
                worker=WORKER, group=lease.group, index=lease.index, attempt=lease.attempt, episode=episode
            )
            self._push(now + self.plan.episode_s(lease), submit)
        self._held |= {lease.id for lease in leases}
        self.episodes += len(leases)
        return bool(leases)

    async def _step(self) -> bool:
        """Begin a step if there is a batch for it."""
        if self._stepping:
            return False
        reply = await self._flow.batch(m.BatchRequest(policy=POLICY, trainer_epoch=self._epoch))
        if reply.batch is None:
            self._finished = reply.finished
            return reply.finished
        commit, manifest = self._stepped(reply.batch)
        self._stepping = True
        self._push(self._clock.monotonic() + self.plan.step_s, commit, manifest)
        return True

    def _stepped(self, batch: Batch) -> tuple[m.CommitRequest, Manifest | None]:
        report = self._backend.step(batch)
        manifest = None
        if report.updated:
            target = self._folder / "weights"
            target.mkdir()
            manifest = self._manifest(self._backend.export(target), version=batch.version + 1)
        commit = m.CommitRequest(
            policy=POLICY,
            batch=batch.id,
            trainer_epoch=self._epoch,
            manifest=manifest,
            reason=None if report.updated else report.reason,
            metrics=report.metrics,
            oldest_checkpoint=batch.version or None,  # it is never resumed: what is behind it may be forgotten
        )
        return commit, manifest

    async def _happen(self) -> None:
        """Everything that is due now, in its order; what comes together is submitted together."""
        now = self._clock.monotonic()
        submits: list[m.SubmitRequest] = []
        while self._due and self._due[0][0] <= now:
            _, _, request, manifest = heapq.heappop(self._due)
            if isinstance(request, m.SubmitRequest):
                submits.append(request)
            else:
                await self._submit(submits)
                submits = []
                await self._commit(request, manifest)
        await self._submit(submits)

    async def _submit(self, requests: Sequence[m.SubmitRequest]) -> None:
        await asyncio.gather(*(self._flow.submit(request) for request in requests))
        self._held -= {lease_of(request) for request in requests}

    async def _commit(self, request: m.CommitRequest, manifest: Manifest | None) -> None:
        reply = await self._flow.commit(request)
        self._stepping = False
        self._finished = reply.finished
        if manifest is None:
            return
        weights = self._folder / "weights"
        await self._engine.load(manifest, sorted(weights.iterdir()))
        shutil.rmtree(weights)
        await self._service.tick()
        await self._renew()
        if manifest.version % self.plan.eval_every == 0 or manifest.version == self.plan.steps:
            await self._evaluate(manifest.version)

    async def _renew(self) -> None:
        """What has gone stale before it ended is played no further, as a worker's heartbeat finds out."""
        if not self._held:
            return
        beat = m.RenewRequest(worker=WORKER, incarnation="0", held=tuple(sorted(self._held)))
        lost = set((await self._flow.renew(beat)).lost)
        self._held -= lost
        self.cancelled += len(lost)
        self._due = [each for each in self._due if lease_of(each[2]) not in lost]
        heapq.heapify(self._due)

    async def _evaluate(self, version: int) -> None:
        tasks = self.plan.held_out
        assert tasks.size is not None, "held-out tasks are so many"
        leases = [
            Lease(group=n + 1, index=0, attempt=1, task=tasks.task(n), purpose=Purpose.EVAL) for n in range(tasks.size)
        ]
        episodes = await asyncio.gather(*(self._player(lease) for lease in leases))
        score = sum(each.score or 0.0 for each in episodes) / len(episodes)
        point = Point(version=version, episodes=self.episodes, at_s=self._clock.monotonic(), score=score)
        self.points.append(point)

    def _push(self, at: float, request: m.SubmitRequest | m.CommitRequest, manifest: Manifest | None = None) -> None:
        heapq.heappush(self._due, (at, next(self._order), request, manifest))

    def _manifest(self, files: list[Path], *, version: int) -> Manifest:
        stored = tuple(weight_file_of(path) for path in files)
        return Manifest(policy=POLICY, version=version, digest=self._backend.digest(), files=stored, serial=version)

    # ── what the ledger says ──

    def _found(self, ended: str) -> Found:
        store = self._service.ledger.store
        ages = store.all(
            "SELECT b.version, b.version - MAX(p.fresh_version), b.version - MIN(p.min_version) FROM batches b "
            "JOIN batch_groups g ON g.batch = b.id JOIN group_policy p ON p.group_id = g.group_id "
            "WHERE b.state = 'committed' GROUP BY b.id ORDER BY b.version"
        )
        groups = store.all(
            "SELECT state || COALESCE('/' || reason, ''), COUNT(*) FROM group_policy "
            "WHERE state IN ('trained', 'stale', 'dropped') GROUP BY 1"
        )
        trained = store.all(
            "SELECT g.task_key FROM groups g JOIN group_policy p ON p.group_id = g.id WHERE p.state = 'trained' "
            "ORDER BY g.id"
        )
        masked = store.all("SELECT mask, COUNT(*) FROM samples WHERE mask IS NOT NULL GROUP BY 1")
        return Found(
            points=tuple(self.points),
            ages=tuple(Aged(version=version, youngest=young, oldest=old) for version, young, old in ages),
            groups=dict(groups),
            trained=tuple(key for (key,) in trained),
            masked=dict(masked),
            cancelled=self.cancelled,
            ended=ended,
        )


def played(
    cell: Cell, folder: Path, *, supervised: int, evals: int, loss: str = "", **plan: Any
) -> tuple[Found, dict[str, Any]]:
    """One run of a table, in this process, and the figures that every cell has; ``plan``: what is this table's own."""
    began, cpu = time.monotonic(), time.process_time()
    seed, steps = cell["seed"], cell["steps"]
    settings = TrainerSettings(
        lr=cell["lr"],
        betas=(0.9, 0.95),
        dtype="float32",
        threads=1,
        loss=LossSettings(name=loss) if loss else LossSettings(),
    )
    own = Plan(
        model=started(folder.parent, seed=seed, steps=supervised),
        trainer=settings,
        steps=steps,
        seed=seed,
        eval_every=max(1, steps // evals),
        **plan,
    )
    found = asyncio.run(Drive(own, folder).run())
    return found, {
        "groups": found.groups,
        "masked": found.masked,
        "ended": found.ended,
        "wall_s": round(time.monotonic() - began, 1),
        "cpu_s": round(time.process_time() - cpu, 1),
    }


def lease_of(request: m.SubmitRequest | m.CommitRequest) -> str:
    """Id of the lease that is submitted; empty for a step."""
    return f"{request.group}/{request.index}/{request.attempt}" if isinstance(request, m.SubmitRequest) else ""


def _spec(plan: Plan) -> RunSpec:
    bound = PolicySpec(max_staleness=plan.max_staleness, groups_per_batch=plan.groups_per_batch)
    return RunSpec(
        run="bench",
        seed=plan.seed,
        steps=plan.steps,
        policies={POLICY: bound},
        roles={POLICY: POLICY},
        pipeline=plan.pipeline,
        limits=plan.limits,
    )
