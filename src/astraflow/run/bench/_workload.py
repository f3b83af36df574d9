"""One workload of several policies, played in virtual time under any Pace, and who waited for whom meanwhile.

    tools ◄─ engine m0      every role speaks once, in turn; after the first one a tool is waited for
      └────► engine m1 … engine mN ─► trainer m0 … trainer mN     (a core each)

Lengths and tools are drawn by episode alone, so that schedules differ in nothing but what they wait for.
"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from astraflow.algorithms.base import Pace
from astraflow.algorithms.credit import GroupMean
from astraflow.algorithms.curate import Shuffled
from astraflow.algorithms.pipeline import Pipeline
from astraflow.algorithms.select import EarliestDeadline
from astraflow.dataflow.local import LocalDataflow
from astraflow.dataflow.service import DataflowService
from astraflow.dataflow.settings import Limits, PolicySpec, RunSpec
from astraflow.rollout.agents import Seat
from astraflow.rollout.loop_guard import PLAYING
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
from astraflow.types import Lease, Manifest, Sampling, Task
from astraflow.weights.publish import Publisher
from astraflow.weights.subscribe import Subscriber
from astraflow.wire import messages as m

SIGMA = math.log(8) / 2.326
"""Of the log-normal whose p99 is 8 times its median."""
SLOTS, TICK_S, END_CHANCE = 4, 0.05, 1 / 12
GROUPS, SIZE = 4, 8
MAX_STALENESS = 8
VOCABULARY = 100
SAMPLING = Sampling(max_tokens=400)
LOOK_S = 0.1
TOOLS, ADMISSION = "tools", "admission"
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""A disk has no part in virtual time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Took:
    """One run."""

    wall_s: float
    busy_s: dict[str, float]
    """Engine or trainer → time that it worked."""
    waits_s: dict[str, dict[str, float]]
    """Engine or trainer → what it waited for → how long: where most of what was to come to it was at the time,
    ``admission`` if nothing was under way."""
    needed_s: float
    """Time of the busiest one had nothing been generated but what was trained."""
    steady_ratio: float
    """Time that the busiest one worked / time, between the first and the last quarter of the steps."""
    generated: int
    """Tokens, those of dropped groups too."""
    trained: int

    @property
    def bound_s(self) -> float:
        return max(self.busy_s.values())


@dataclass(kw_only=True, slots=True)
class Stage:
    """The machines of a run, and what they did so far."""

    engines: dict[str, FakeEngine]
    step_s: dict[str, float]
    at_tools: int = 0
    stepping: set[str] = field(default_factory=set)
    steps: Counter[str] = field(default_factory=Counter)
    done: set[str] = field(default_factory=set)
    """Policies whose trainer has ended."""
    marks: dict[str, list[tuple[float, dict[str, float]]]] = field(default_factory=dict)
    """Policy → of each of its steps when it ended, and what every machine had worked by then."""
    waits: dict[str, dict[str, float]] = field(default_factory=dict)

    def busy_s(self) -> dict[str, float]:
        busy = {f"engine {name}": engine.steps * TICK_S / SLOTS for name, engine in self.engines.items()}
        return busy | {f"trainer {name}": self.steps[name] * cost for name, cost in self.step_s.items()}

    def stepped(self, policy: str, now: float) -> None:
        self.steps[policy] += 1
        self.marks.setdefault(policy, []).append((now, self.busy_s()))

    def look(self) -> None:
        """Whoever is idle now has waited since the last look for what is not there yet."""
        places = {f"engine {name}": each.busy + each.waiting for name, each in self.engines.items()}
        before: dict[str, int] = {}
        for name, engine in self.engines.items():
            idle = 1 - min(SLOTS, engine.busy) / SLOTS
            if idle:
                self._waited(f"engine {name}", before, LOOK_S * idle)
            before[f"engine {name}"] = places[f"engine {name}"]
            before.setdefault(TOOLS, self.at_tools)
        for name in self.engines.keys() - self.stepping - self.done:
            self._waited(f"trainer {name}", before, LOOK_S)

    def _waited(self, who: str, places: Mapping[str, int], seconds: float) -> None:
        most = max(places, key=lambda place: places[place], default=ADMISSION)
        what = most if places.get(most) else ADMISSION
        mine = self.waits.setdefault(who, {})
        mine[what] = mine.get(what, 0.0) + seconds

    def steady_ratio(self) -> float:
        """Of the window between the first and the last quarter of the steps of whoever ended last."""
        last = max(self.marks.values(), key=lambda marks: marks[-1][0])
        quarter = len(last) // 4
        (began, before), (ended, after) = last[quarter], last[-1 - quarter]
        if ended <= began:
            return math.nan
        return max(after[name] - before[name] for name in after) / (ended - began)


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
        with tempfile.TemporaryDirectory(prefix="multipolicy-", dir=MEMORY) as folder:
            return run_virtual(lambda: self._play(pace, Path(folder)), limit_s=1e7)

    def generation_s(self, episodes: int = 256) -> float:
        """Measured: mean time of an episode that is played alone, without its tool."""
        with tempfile.TemporaryDirectory(prefix="multipolicy-", dir=MEMORY) as folder:
            return run_virtual(lambda: replace(self, tool_s=0.0)._alone(Path(folder), episodes), limit_s=1e7)

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

    async def talk(self, task: Task, agents: Agents, stage: Stage) -> Reward:
        rewards: dict[int, float | None] = {}
        for name in self.names:
            reply = await agents[name].chat([{"role": "user", "content": task.key}])
            rewards[reply.turn] = float(zlib.crc32(repr((name, reply.tokens)).encode()) % 2)
            if name == self.names[0] and self.tool_s:
                draw = random.Random(f"{self.seed}/{PLAYING.get()}")
                stage.at_tools += 1
                try:
                    await asyncio.sleep(self.tool_s * math.exp(draw.gauss(0.0, SIGMA)))
                finally:
                    stage.at_tools -= 1
        return Reward(turns=rewards)

    async def _play(self, pace: Pace, folder: Path) -> Took:
        clock = VirtualClock(asyncio.get_running_loop())
        service = DataflowService.open(self.spec(pace), folder / "run", clock=clock)
        flow, store, stage = LocalDataflow(service), MemoryStore(), self._stage()
        served: dict[str, ServedPolicy] = {}
        for name, engine in stage.engines.items():
            await service.publish_initial(await _publish(Publisher(store, name), FakeBackend(), folder / name / "0"))
            served[name] = ServedPolicy(
                name,
                engine,
                lambda load, name=name: Subscriber(name, store, folder / name / "cache", load),  # type: ignore[misc]
            )
        rollout = self._rollout(flow, served, stage, clock)
        began = clock.monotonic()
        beside = [asyncio.ensure_future(service.run()), asyncio.ensure_future(_watch(stage))]
        trainers = (self._train(flow, name, store, folder / name, stage) for name in self.names)
        await asyncio.gather(rollout.run(), *trainers)
        wall_s = clock.monotonic() - began
        for task in beside:
            task.cancel()
        tokens: dict[str, int] = dict(
            service.ledger.store.all("SELECT policy, SUM(tokens) FROM samples WHERE state = 'trained' GROUP BY policy")
        )
        await service.close()
        needed = [count * TICK_S / SLOTS for count in tokens.values()]
        return Took(
            wall_s=wall_s,
            busy_s=stage.busy_s(),
            waits_s={who: dict(found) for who, found in sorted(stage.waits.items())},
            needed_s=max(*needed, *(self.steps * cost for cost in stage.step_s.values())),
            steady_ratio=stage.steady_ratio(),
            generated=sum(engine.steps for engine in stage.engines.values()),
            trained=sum(tokens.values()),
        )

    async def _alone(self, folder: Path, episodes: int) -> float:
        clock, stage, store = VirtualClock(asyncio.get_running_loop()), self._stage(), MemoryStore()
        for name, engine in stage.engines.items():
            await engine.load(await _publish(Publisher(store, name), FakeBackend(), folder / name), [])
        player = self._player(stage, clock)
        began = clock.monotonic()
        for number in range(episodes):
            seed = zlib.crc32(f"{self.seed}/{number}".encode())
            await player(Lease(group=number, index=0, attempt=1, task=Task(key=str(number)), seed=seed))
        return (clock.monotonic() - began) / episodes

    def _stage(self) -> Stage:
        engines = {
            name: FakeEngine(
                policy=name,
                slots=SLOTS,
                vocabulary=VOCABULARY,
                tick_s=TICK_S,
                end_chance=END_CHANCE,
                by_version=False,
            )
            for name in self.names
        }
        return Stage(engines=engines, step_s={name: self.step_s(name) for name in self.names})

    def _player(self, stage: Stage, clock: VirtualClock) -> WorkflowPlayer:
        template = character_template()
        seats = {
            name: Seat(policy=name, engine=engine, template=template, sampling=SAMPLING)
            for name, engine in stage.engines.items()
        }

        async def talk(task: Task, agents: Agents) -> Reward:
            return await self.talk(task, agents, stage)

        return WorkflowPlayer(workflow=talk, seats=seats, clock=clock)

    def _rollout(
        self, flow: LocalDataflow, served: dict[str, ServedPolicy], stage: Stage, clock: VirtualClock
    ) -> RolloutService:
        settings = RolloutSettings(slots=4 * MAX_STALENESS * GROUPS * SIZE, sampling=SAMPLING)
        return RolloutService(
            name="rollout-0",
            incarnation="0",
            dataflow=flow,
            players={"": self._player(stage, clock)},
            policies=served,
            capabilities=m.Capabilities(policies=tuple(served)),
            settings=settings,
            clock=clock,
        )

    async def _train(self, flow: LocalDataflow, policy: str, store: MemoryStore, folder: Path, stage: Stage) -> None:
        backend, publisher = FakeBackend(), Publisher(store, policy)
        resume = m.ResumeRequest(
            policy=policy, version=0, digest=backend.digest(), trainer=f"trainer-{policy}", incarnation="0"
        )
        epoch = (await flow.resume(resume)).trainer_epoch
        finished = False
        while not finished:
            reply = await flow.batch(m.BatchRequest(policy=policy, trainer_epoch=epoch, wait_s=60.0))
            finished = reply.finished
            if reply.batch is None:
                continue
            stage.stepping.add(policy)
            await asyncio.sleep(stage.step_s[policy])
            stage.stepping.discard(policy)
            backend.step(reply.batch)
            stage.stepped(policy, asyncio.get_running_loop().time())
            manifest = await _publish(publisher, backend, folder / str(backend.version))
            done = m.CommitRequest(policy=policy, batch=reply.batch.id, trainer_epoch=epoch, manifest=manifest)
            finished = (await flow.commit(done)).finished
        stage.done.add(policy)


async def _watch(stage: Stage) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        stage.look()


async def _publish(publisher: Publisher, backend: FakeBackend, folder: Path) -> Manifest:
    return await publisher.publish(backend.version, _export(backend, folder), backend.digest())


def _export(backend: FakeBackend, folder: Path) -> list[Path]:
    folder.mkdir(parents=True)
    return backend.export(folder)
