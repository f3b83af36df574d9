"""Policies without a barrier against the same run under ``schedule=barrier`` and ``sync``, in virtual time.

Real: dataflow with its ledger, the rollout service, agents, subscribers, staleness. Modelled: decoding (a fixed time a
token, ``SLOTS`` sequences at once, an engine per policy), optimiser steps (1 : 3 by policy) and tools, whose time is
log-normal with p99 / p50 = 8. Nothing shares a core: what differs is waiting alone. What is learned is not seen here.

    bound         the busiest engine or trainer, surplus counted: no schedule could be faster with what it generated
    bound_ratio   bound / time taken
"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astraflow.algorithms.base import Pace
from astraflow.algorithms.credit import GroupMean
from astraflow.algorithms.curate import Shuffled
from astraflow.algorithms.pace import BoundedStaleness
from astraflow.algorithms.pace_rounds import SCHEDULES
from astraflow.algorithms.pipeline import Pipeline
from astraflow.algorithms.select import EarliestDeadline
from astraflow.dataflow.local import LocalDataflow
from astraflow.dataflow.service import DataflowService
from astraflow.dataflow.settings import Limits, PolicySpec, RunSpec
from astraflow.rollout.agents import Seat
from astraflow.rollout.play import WorkflowPlayer
from astraflow.rollout.served import ServedPolicy
from astraflow.rollout.service import RolloutService
from astraflow.rollout.settings import RolloutSettings
from astraflow.rollout.workflow import Agents, Reward
from astraflow.tasks.generated import GeneratedTasks
from astraflow.testing.check_workflow import character_template
from astraflow.testing.fake_backend import FakeBackend
from astraflow.testing.fake_engine import FakeEngine
from astraflow.testing.memory_store import MemoryStore
from astraflow.testing.virtual_clock import VirtualClock
from astraflow.testing.virtual_loop import run_virtual
from astraflow.types import Manifest, Sampling, Task
from astraflow.weights.publish import Publisher
from astraflow.weights.subscribe import Subscriber
from astraflow.wire import messages as m

LATENCIES = (0, 1, 4)
"""Median of a tool, in generation times of one episode."""
SIGMA = math.log(8) / 2.326
"""Of the log-normal whose p99 is 8 times its median."""
SLOTS, TICK_S, END_CHANCE = 4, 0.05, 1 / 12
GROUPS, SIZE = 4, 8
MAX_STALENESS = 8
STEPS, STEPS_OF_EIGHT = 40, 12
VOCABULARY = 100
SAMPLING = Sampling(max_tokens=400)


@dataclass(frozen=True, slots=True)
class Took:
    """One run."""

    wall_s: float
    busy_s: dict[str, float]
    """Engine or trainer → time that it worked."""
    generated: int
    """Tokens, those of dropped groups too."""
    trained: int

    @property
    def bound_s(self) -> float:
        return max(self.busy_s.values())

    def as_json(self) -> dict[str, Any]:
        busy = {name: round(seconds, 2) for name, seconds in self.busy_s.items()}
        numbers = {"wall_s": round(self.wall_s, 2), "bound_s": round(self.bound_s, 2)}
        return {**numbers, "busy_s": busy, "generated_tokens": self.generated, "trained_tokens": self.trained}


def main(seed: int = 0) -> dict[str, Any]:
    """Two policies, then eight."""
    return {
        **measure(policies=2, steps=STEPS, seed=seed),
        "eight": measure(policies=8, steps=STEPS_OF_EIGHT, seed=seed),
    }


def measure(*, policies: int, steps: int, seed: int, latencies: Sequence[int] = LATENCIES) -> dict[str, Any]:
    generation_s = policies * TICK_S / END_CHANCE
    paces: dict[str, Pace] = {"default": BoundedStaleness(), **{name: make() for name, make in SCHEDULES.items()}}
    found: dict[str, dict[str, Took]] = {}
    for latency in latencies:
        run = Run(policies=policies, steps=steps, seed=seed, tool_s=latency * generation_s)
        found[str(latency)] = {name: run.under(pace) for name, pace in paces.items()}
    return {
        "virtual_time": True,
        "policies": policies,
        "steps": steps,
        "generation_s": generation_s,
        "speedup_vs_sync": {at: round(took["sync"].wall_s / took["default"].wall_s, 3) for at, took in found.items()},
        "speedup_vs_barrier": {
            at: round(took["barrier"].wall_s / took["default"].wall_s, 3) for at, took in found.items()
        },
        "bound_ratio": {at: round(took["default"].bound_s / took["default"].wall_s, 3) for at, took in found.items()},
        "modes": {at: {name: each.as_json() for name, each in took.items()} for at, took in found.items()},
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One workload, to be played under any Pace."""

    policies: int
    steps: int
    seed: int
    tool_s: float

    @property
    def names(self) -> list[str]:
        return [f"m{number}" for number in range(self.policies)]

    def step_s(self, policy: str) -> float:
        """1 : 3 from the first to the last; the dearest takes as long as its share of generating."""
        generating_s = GROUPS * SIZE * TICK_S / END_CHANCE / SLOTS
        number = self.names.index(policy)
        return generating_s * (1 + 2 * number / max(1, self.policies - 1)) / 3.2

    def under(self, pace: Pace) -> Took:
        with tempfile.TemporaryDirectory(prefix="multipolicy-") as folder:
            return run_virtual(lambda: self._play(pace, Path(folder)), limit_s=1e7)

    def spec(self, pace: Pace) -> RunSpec:
        tasks = GeneratedTasks("numbers", lambda index: Task(key=str(index)))
        return RunSpec(
            run="multipolicy",
            seed=self.seed,
            steps=self.steps,
            policies={name: PolicySpec(max_staleness=MAX_STALENESS, groups_per_batch=GROUPS) for name in self.names},
            roles={name: name for name in self.names},
            pipeline=Pipeline(
                curate=Shuffled(tasks, group_size=SIZE, seed=self.seed),
                pace=pace,
                credit=GroupMean(),
                select=EarliestDeadline(),
            ),
            limits=Limits(time_limit_s=1e6, dead_after_s=1e6, lease_ttl_s=1e6),
        )

    async def talk(self, task: Task, agents: Agents) -> Reward:
        """Every role speaks once; after the first one a tool is waited for."""
        rewards: dict[int, float | None] = {}
        for name in self.names:
            reply = await agents[name].chat([{"role": "user", "content": task.key}])
            rewards[reply.turn] = float(zlib.crc32(repr((name, reply.tokens)).encode()) % 2)
            if name == self.names[0] and self.tool_s:
                draw = random.Random(f"{self.seed}/{task.key}/{reply.tokens}")
                await asyncio.sleep(self.tool_s * math.exp(draw.gauss(0.0, SIGMA)))
        return Reward(turns=rewards)

    async def _play(self, pace: Pace, folder: Path) -> Took:
        clock = VirtualClock(asyncio.get_running_loop())
        service = DataflowService.open(self.spec(pace), folder / "run", clock=clock)
        flow, store = LocalDataflow(service), MemoryStore()
        engines: dict[str, FakeEngine] = {}
        served: dict[str, ServedPolicy] = {}
        for name in self.names:
            await service.publish_initial(await _publish(Publisher(store, name), FakeBackend(), folder / name / "0"))
            engines[name] = FakeEngine(
                policy=name, slots=SLOTS, vocabulary=VOCABULARY, tick_s=TICK_S, end_chance=END_CHANCE
            )
            served[name] = ServedPolicy(
                name,
                engines[name],
                lambda load, name=name: Subscriber(name, store, folder / name / "cache", load),  # type: ignore[misc]
            )
        rollout = self._rollout(flow, served, clock)
        began = clock.monotonic()
        time_passes = asyncio.ensure_future(service.run())
        await asyncio.gather(rollout.run(), *(self._train(flow, name, store, folder / name) for name in self.names))
        wall_s = clock.monotonic() - began
        time_passes.cancel()
        trained = service.ledger.store.number("SELECT COALESCE(SUM(tokens), 0) FROM samples WHERE state = 'trained'")
        await service.close()
        busy = {f"engine {name}": engine.steps * TICK_S / SLOTS for name, engine in engines.items()}
        busy |= {f"trainer {name}": self.steps * self.step_s(name) for name in self.names}
        return Took(wall_s, busy, sum(engine.steps for engine in engines.values()), trained)

    def _rollout(self, flow: LocalDataflow, served: dict[str, ServedPolicy], clock: VirtualClock) -> RolloutService:
        template = character_template()
        seats = {
            name: Seat(policy=name, engine=each.engine, template=template, sampling=SAMPLING)
            for name, each in served.items()
        }
        settings = RolloutSettings(slots=4 * MAX_STALENESS * GROUPS * SIZE, sampling=SAMPLING)
        return RolloutService(
            name="rollout-0",
            incarnation="0",
            dataflow=flow,
            players={"": WorkflowPlayer(workflow=self.talk, seats=seats, clock=clock)},
            policies=served,
            capabilities=m.Capabilities(policies=tuple(served)),
            settings=settings,
            clock=clock,
        )

    async def _train(self, flow: LocalDataflow, policy: str, store: MemoryStore, folder: Path) -> None:
        backend, publisher = FakeBackend(), Publisher(store, policy)
        resume = m.ResumeRequest(
            policy=policy, version=0, digest=backend.digest(), trainer=f"trainer-{policy}", incarnation="0"
        )
        epoch = (await flow.resume(resume)).trainer_epoch
        while True:
            reply = await flow.batch(m.BatchRequest(policy=policy, trainer_epoch=epoch, wait_s=60.0))
            if reply.finished:
                return
            if reply.batch is None:
                continue
            await asyncio.sleep(self.step_s(policy))
            backend.step(reply.batch)
            manifest = await _publish(publisher, backend, folder / str(backend.version))
            done = m.CommitRequest(policy=policy, batch=reply.batch.id, trainer_epoch=epoch, manifest=manifest)
            if (await flow.commit(done)).finished:
                return


async def _publish(publisher: Publisher, backend: FakeBackend, folder: Path) -> Manifest:
    return await publisher.publish(backend.version, _export(backend, folder), backend.digest())


def _export(backend: FakeBackend, folder: Path) -> list[Path]:
    folder.mkdir(parents=True)
    return backend.export(folder)
