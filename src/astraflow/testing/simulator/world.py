"""One simulated run: the real dataflow service, rollout services and training loops, on one loop in virtual time.

    Host ── dataflow (Process) on a Database that survives it
      ▲ FaultyDataflow per client
    workers (Process each): RolloutService + FakeEngine      trainers (one Process per policy): TrainLoop + FakeBackend
                       └───────────────── MemoryStore ──────────────────┘

Everything that happens comes from ``Plan.draw(seed)``: the same seed gives the same history.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from astraflow.dataflow.conservation import balance
from astraflow.rollout.service import RolloutService
from astraflow.testing.faulty import Faults, FaultyDataflow
from astraflow.testing.memory_store import MemoryStore
from astraflow.testing.simulator.chaos import chaos
from astraflow.testing.simulator.checks import check_end, check_ledger
from astraflow.testing.simulator.database import Database
from astraflow.testing.simulator.edges import Edge, taken
from astraflow.testing.simulator.history import History
from astraflow.testing.simulator.host import Host
from astraflow.testing.simulator.lives import surviving_backend, trainer_life, worker_life, write_version_0
from astraflow.testing.simulator.parts import run_spec, template
from astraflow.testing.simulator.plan import Plan
from astraflow.testing.simulator.process import Life, Process
from astraflow.testing.simulator.serve import dataflow_life
from astraflow.testing.virtual_clock import VirtualClock
from astraflow.types import Manifest
from astraflow.weights.publish import Publisher
from astraflow.wire.protocol import Dataflow

LOOK_EVERY_S = 5.0
COUNTED = {
    "replayed": "SELECT COUNT(*) FROM batch_groups WHERE use > 0",
    "older_versions": "SELECT COUNT(*) FROM version_choices",
}
"""No faults, but what they must not break: how often it happened."""


class Broken(AssertionError):
    """An invariant does not hold; the message has the seed, what is broken, and the last lines of the history."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a finished simulation leaves."""

    seed: int
    history: str
    """Digest of every event in its order: equal for equal seeds."""
    virtual_s: float
    faults: Counter[str]
    edges: dict[Edge, int]


class World:
    """Holds the parts and lets the plan's acts happen to them."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.spec = run_spec(plan)
        self.template = template()
        self.history = History()
        self.database = Database(folder / "run.db")
        self.host = Host(self.database, self.history)
        self.store = MemoryStore(rng=self.dice("store"), failures=plan.faults.drop_reply / 2, slowest_s=0.5)
        self.version_0: dict[str, Manifest] = {}
        self.clocks: list[VirtualClock] = []
        self.connections: list[FaultyDataflow] = []
        self.current: dict[str, FaultyDataflow] = {}
        """Newest connection of each client."""
        self.services: dict[str, RolloutService] = {}
        self.slow_until: dict[str, float] = {}
        self.poisoned: Counter[str] = Counter()
        self.calm = False
        self.workers: list[Process] = []
        self.dataflow = Process(
            "dataflow",
            lambda life: dataflow_life(self, life),
            history=self.history,
            restart_s=self._restart_s("dataflow"),
            on_death=lambda _: self.host.down(),
        )
        self.trainers = {each.name: self._trainer(each.name) for each in plan.policies}
        self._seconds: list[Process] = []
        self._tasks: asyncio.TaskGroup | None = None
        self._working: list[asyncio.Task[None]] = []

    # ── parts ──

    def dice(self, what: str) -> random.Random:
        """A stream of randomness of its own, so that one more draw somewhere does not move all others."""
        return random.Random(f"{what}/{self.plan.seed}")

    def clock(self) -> VirtualClock:
        clock = VirtualClock(asyncio.get_running_loop())
        self.clocks.append(clock)
        return clock

    def connect(self, who: str, life: Life) -> FaultyDataflow:
        """A new connection for one life of a client."""
        patience_s = self.plan.faults.patience_s
        faults = Faults.none(patience_s=patience_s) if self.calm else self.plan.faults
        dice = self.dice(f"net/{who}/{life.number}")
        connection = FaultyDataflow(cast(Dataflow, self.host), rng=dice, faults=faults, counts=self.history.faults)
        self.connections.append(connection)
        self.current[who] = connection
        return connection

    def version(self, policy: str) -> int:
        """As the ledger has it now."""
        query = "SELECT version FROM policies WHERE name = ?"
        row = self.database.keeper.execute(query, (policy,)).fetchone()
        return int(row[0]) if row else 0  # dataflow died before it had written anything

    def pause_s(self, worker: str) -> float:
        """How long this worker takes to do nothing: slow machines lose their leases and come late."""
        slow = asyncio.get_running_loop().time() < self.slow_until.get(worker, 0.0)
        return 15.0 if slow else 0.0

    def add_worker(self) -> None:
        name = f"worker{len(self.workers)}"
        process = Process(
            name,
            lambda life: worker_life(self, name, life),
            history=self.history,
            restart_s=self._restart_s(name),
            on_death=lambda _: self._cut_off(name),
        )
        self.workers.append(process)
        assert self._tasks is not None
        self._working.append(self._tasks.create_task(process.run(), name=name))

    def second_trainer(self, policy: str, seconds: float) -> bool:
        """Beside the one that lives. It is never started again: of two that were, each would end the other for ever."""
        if not self.trainers[policy].alive or self._tasks is None:
            return False
        process = self._trainer(policy, second=f"-again{len(self._seconds)}")
        process.stays_down = True
        self._seconds.append(process)
        self._tasks.create_task(process.run(), name=process.name)
        asyncio.get_running_loop().call_later(seconds, process.crash)
        return True

    def _trainer(self, policy: str, *, second: str = "") -> Process:
        plan = next(each for each in self.plan.policies if each.name == policy)
        name = f"trainer-{policy}{second}"
        return Process(
            name,
            lambda life: trainer_life(self, plan, life, second=second),
            history=self.history,
            restart_s=self._restart_s(name),
            on_death=lambda _: self._cut_off(name),
        )

    def _cut_off(self, who: str) -> None:
        if who in self.current:
            self.current[who].abandon()

    def _restart_s(self, who: str) -> Callable[[], float]:
        dice = self.dice(f"restart/{who}")
        return lambda: dice.uniform(0.5, 3.0)

    # ── the run ──

    async def run(self) -> Outcome:
        """To its end, or Broken."""
        try:
            await self._publish_version_0()
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                dataflow = tasks.create_task(self.dataflow.run(), name="dataflow")
                trainers = [tasks.create_task(each.run(), name=each.name) for each in self.trainers.values()]
                for _ in range(self.plan.workers):
                    self.add_worker()
                acts = tasks.create_task(chaos(self), name="chaos")
                looks = tasks.create_task(self._look(), name="look")
                await asyncio.wait([acts, *trainers])
                await self._until_finished()
                for task in (dataflow, looks):
                    task.cancel()
            return self._judge()
        except BaseExceptionGroup as group:
            first: BaseException = group
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from group
        finally:
            for connection in self.connections:
                await connection.aclose()
            self.database.close()

    async def _publish_version_0(self) -> None:
        """The launcher does it before it starts anything."""
        for policy in self.spec.policies:
            files, digest = write_version_0(self.folder / f"version-0-{policy}")
            publisher = Publisher(MemoryStore(), policy)
            self.version_0[policy] = await publisher.publish(0, files, digest)
            for path, file in zip(files, self.version_0[policy].files, strict=True):
                self.store.files[file.sha256] = path.read_bytes()

    async def _until_finished(self) -> None:
        """Trainers have ended; evaluations may go on, workers leave when dataflow says that it is over."""
        for second in self._seconds:
            second.crash()
        while running := [task for task in self._working if not task.done()]:
            await asyncio.wait(running)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.check()
            self._replace_leavers()

    def _replace_leavers(self) -> None:
        """Somebody always plays, unless the run is over."""
        waiting = self.database.keeper.execute("SELECT COUNT(*) FROM evals WHERE state = 'open'").fetchone()[0]
        over = not waiting and all(trainer.finished for trainer in self.trainers.values())
        if not over and all(worker.finished for worker in self.workers):
            self.add_worker()

    def be_calm(self) -> None:
        """Faults stop: from here on the run must make progress by itself."""
        self.calm = True
        self.database.snuff()
        self.database.room = None
        self.store.failures = 0.0
        self.slow_until.clear()
        for connection in self.connections:
            connection.faults = Faults.none(patience_s=connection.faults.patience_s)
        self.history.note("faults stop")

    # ── verdicts ──

    def check(self) -> None:
        problems = check_ledger(self.database.keeper)
        counted = balance(self.database.keeper)
        if counted["difference"]:
            problems.append(f"the ledger's own balance differs: {counted}")
        self._require(problems)

    def _judge(self) -> Outcome:
        loop = asyncio.get_running_loop()
        self.check()
        self._require(
            check_end(
                self.database.keeper,
                self.history,
                {policy: surviving_backend(self, policy) for policy in self.trainers},
                steps=self.plan.steps,
                max_staleness={each.name: each.max_staleness for each in self.plan.policies},
            )
        )
        for name, query in COUNTED.items():
            self.history.faults[name] += self.database.keeper.execute(query).fetchone()[0]
        for row in self.database.keeper.execute("SELECT id, at, kind, group_id, idx, policy, batch, data FROM events"):
            self.history.note(repr(row))
        return Outcome(
            seed=self.plan.seed,
            history=self.history.digest(),
            virtual_s=loop.time(),
            faults=self.history.faults,
            edges=taken(self.database.keeper),
        )

    def _require(self, problems: list[str]) -> None:
        if problems:
            tail = "\n  ".join(self.history.lines[-25:])
            raise Broken(f"seed {self.plan.seed}: {'; '.join(problems[:10])}\nlast events:\n  {tail}\n{self.plan}")
