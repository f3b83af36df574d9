"""Workflows that do what they must not, played by the real service for the real dataflow: the episode gets the right
outcome and message, and the others go on. In virtual time; only the engine is a fake."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from astraflow.algorithms.credit import GroupMean
from astraflow.algorithms.curate import Shuffled
from astraflow.algorithms.pace import BoundedStaleness
from astraflow.algorithms.pipeline import Pipeline
from astraflow.algorithms.select import EarliestDeadline
from astraflow.dataflow.local import LocalDataflow
from astraflow.dataflow.service import DataflowService
from astraflow.dataflow.settings import PolicySpec, RunSpec
from astraflow.errors import BadRequest, EpisodeOver
from astraflow.rollout.agents import Seat
from astraflow.rollout.play import WorkflowPlayer
from astraflow.rollout.served import ServedPolicy
from astraflow.rollout.service import RolloutService
from astraflow.rollout.settings import RolloutSettings, TreeLimits
from astraflow.rollout.workflow import Agent, Agents, Reward
from astraflow.tasks.lists import ListTasks
from astraflow.testing.check_workflow import character_template
from astraflow.testing.fake_backend import FakeBackend
from astraflow.testing.fake_engine import FakeEngine
from astraflow.testing.memory_store import MemoryStore
from astraflow.testing.virtual_clock import VirtualClock
from astraflow.testing.virtual_loop import run_virtual
from astraflow.types import Sampling, Task
from astraflow.weights.publish import Publisher
from astraflow.weights.subscribe import Subscriber
from astraflow.wire import messages as m

SAMPLING = Sampling(max_tokens=400)
HELLO = [{"role": "user", "content": "hi"}]
ROLES = {"solver": "main", "verifier": "main"}
GOOD = 6


class Odd(BaseException):
    """Neither Exception nor SystemExit."""


class Workflow:
    """The task's key says what it does."""

    def __init__(self) -> None:
        self.kept: list[Agent] = []
        self.lent: list[Agent] = []
        self.refused: list[str] = []
        self.background: list[asyncio.Task[None]] = []

    async def __call__(self, task: Task, agents: Agents) -> Reward:
        act = getattr(self, task.key, None)
        if act is not None:
            return await act(agents)
        await agents["solver"].chat(HELLO)
        await agents["verifier"].chat(HELLO)
        return Reward(solver=1.0, verifier=0.0)

    async def unknown_role(self, agents: Agents) -> Reward:
        await agents["judge"].chat(HELLO)
        return Reward(1.0)

    async def rewards_the_silent(self, agents: Agents) -> Reward:
        await agents["solver"].chat(HELLO)
        return Reward(solver=1.0, verifier=1.0)

    async def rewards_a_stranger(self, agents: Agents) -> Reward:
        await agents["solver"].chat(HELLO)
        return Reward(solver=1.0, judge=1.0)

    async def forgets(self, agents: Agents) -> Reward:
        await agents["solver"].chat(HELLO)
        await agents["verifier"].chat(HELLO)
        return Reward(solver=1.0)

    async def returns_nothing(self, agents: Agents) -> Reward:
        await agents["solver"].chat(HELLO)
        return None  # type: ignore[return-value]

    async def keeps(self, agents: Agents) -> Reward:
        """Its agent is used when its episode has ended: by a task that it leaves behind, and by others."""
        agent = agents["solver"]
        await agent.chat(HELLO)
        self.kept.append(agent)
        self.background.append(asyncio.ensure_future(self._go_on(agent)))
        return Reward(1.0)

    async def _go_on(self, agent: Agent) -> None:
        await asyncio.sleep(5.0)
        try:
            await agent.chat(HELLO)
        except EpisodeOver as error:
            self.refused.append(str(error))

    async def uses_another_s(self, agents: Agents) -> Reward:
        await agents["solver"].chat(HELLO)
        while not self.kept:  # noqa: ASYNC110 - in virtual time, and the episode has a limit
            await asyncio.sleep(1.0)
        await asyncio.sleep(10.0)
        await self.kept[0].chat(HELLO)
        return Reward(1.0)

    async def lends(self, agents: Agents) -> Reward:
        """Its agent is used while its episode goes on, and ends while that is asked."""
        await agents["solver"].chat(HELLO)
        self.lent.append(agents["solver"])
        await asyncio.sleep(60.0)
        return Reward(1.0)

    async def borrows(self, agents: Agents) -> Reward:
        while not self.lent:  # noqa: ASYNC110 - in virtual time, and the episode has a limit
            await asyncio.sleep(1.0)
        while True:
            await self.lent[0].chat(HELLO)

    async def spawns_without_end(self, agents: Agents) -> Reward:
        agent: Agent = agents["solver"]
        while True:
            await agent.chat(HELLO)
            agent = agent.spawn("solver")

    async def asks_without_end(self, agents: Agents) -> Reward:
        while True:
            await agents["solver"].chat(HELLO)

    async def recurses(self, agents: Agents) -> Reward:
        return await self.recurses(agents)

    async def raises_half_way(self, agents: Agents) -> Reward:
        await agents["solver"].chat(HELLO)
        raise ValueError("half-way")

    async def raises_what_is_no_exception(self, agents: Agents) -> Reward:
        await agents["solver"].chat(HELLO)
        raise Odd("half-way")

    async def interrupts(self, agents: Agents) -> Reward:
        await agents["solver"].chat(HELLO)
        raise KeyboardInterrupt

    async def names_keys_by_numbers(self, agents: Agents) -> Reward:
        reply = await agents["solver"].chat(HELLO)
        return Reward(1.0, baseline_keys={reply.turn: 5})  # type: ignore[dict-item]

    async def says_nonsense(self, agents: Agents) -> Reward:
        raise BadRequest("the chat template refused the messages")


LINES = {
    "unknown_role": 'await agents["judge"].chat(HELLO)',
    "says_nonsense": "raise BadRequest(",
    "uses_another_s": "await self.kept[0].chat(HELLO)",
    "borrows": "await self.lent[0].chat(HELLO)",
    "raises_half_way": 'raise ValueError("half-way")',
    "raises_what_is_no_exception": 'raise Odd("half-way")',
    "interrupts": "raise KeyboardInterrupt",
    "recurses": "return await self.recurses(agents)",
    **dict.fromkeys(
        ("rewards_the_silent", "rewards_a_stranger", "forgets", "returns_nothing", "names_keys_by_numbers"),
        "async def __call__(",
    ),
}
"""The line that a message must name: where the workflow did it; of what it returned, where it begins."""

BAD = {
    "unknown_role": ("given_up", "workflow", "no role 'judge'; the recipe's roles: solver, verifier"),
    "rewards_the_silent": ("given_up", "workflow", "gives role 'verifier' 1.0, but it never spoke"),
    "rewards_a_stranger": ("given_up", "workflow", "names role 'judge'; the recipe's roles: solver, verifier"),
    "forgets": ("given_up", "grader", "role 'verifier' spoke and got no reward at all"),
    "returns_nothing": ("given_up", "grader", "must return a Reward, found NoneType"),
    "keeps": ("done", "completed", ""),
    "uses_another_s": ("given_up", "workflow", "is over: its agents answer no more"),
    "lends": ("done", "completed", ""),
    "borrows": ("given_up", "workflow", "may use only the agents that it was called with"),
    "spawns_without_end": ("done", "truncated", ""),
    "asks_without_end": ("done", "truncated", ""),
    "recurses": ("given_up", "workflow", "RecursionError"),
    "says_nonsense": ("given_up", "workflow", "refused the messages"),
    "raises_half_way": ("given_up", "workflow", "ValueError: half-way"),
    "raises_what_is_no_exception": ("given_up", "workflow", "Odd: half-way"),
    "interrupts": ("given_up", "workflow", "KeyboardInterrupt"),
    "names_keys_by_numbers": ("given_up", "workflow", "Reward.baseline_keys[0] must be text, found 5"),
}
"""State, how it ended, and the message."""


def spec() -> RunSpec:
    keys = [*BAD, *(f"good-{n}" for n in range(GOOD))]
    tasks = ListTasks("tasks", [Task(key=key) for key in keys])
    return RunSpec(
        run="bad",
        steps=1,
        policies={"main": PolicySpec(groups_per_batch=len(keys), max_staleness=0)},
        roles=ROLES,
        pipeline=Pipeline(
            curate=Shuffled(tasks, group_size=2, epochs=1),
            pace=BoundedStaleness(),
            credit=GroupMean(),
            select=EarliestDeadline(),
        ),
    )


async def play(folder: Path, workflow: Workflow) -> list[tuple[str, str, str, str, int]]:
    """(task, state, outcome or kind, message, attempts) of every episode, once all have ended."""
    clock = VirtualClock(asyncio.get_running_loop())
    service = DataflowService.open(spec(), folder / "run", clock=clock)
    flow, store, backend = LocalDataflow(service), MemoryStore(), FakeBackend()
    (folder / "0").mkdir()
    await service.publish_initial(
        await Publisher(store, "main").publish(0, backend.export(folder / "0"), backend.digest())
    )
    engine = FakeEngine(policy="main", slots=4, tick_s=0.05, end_chance=1 / 12, vocabulary=100)
    served = ServedPolicy("main", engine, lambda load: Subscriber("main", store, folder / "cache", load))
    seats = {
        role: Seat(policy="main", engine=engine, template=character_template(), sampling=SAMPLING) for role in ROLES
    }
    tree = TreeLimits(depth=3, children=2, agents=8)
    rollout = RolloutService(
        name="w",
        incarnation="0",
        dataflow=flow,
        players={"": WorkflowPlayer(workflow=workflow, seats=seats, max_turns=16, tree=tree, clock=clock)},
        policies={"main": served},
        capabilities=m.Capabilities(policies=("main",)),
        settings=RolloutSettings(slots=8, sampling=SAMPLING),
        clock=clock,
    )
    time_passes, work = asyncio.ensure_future(service.run()), asyncio.ensure_future(rollout.run())
    groups = len(BAD) + GOOD
    closed = "SELECT COUNT(*) FROM groups WHERE state = 'closed'"
    async with asyncio.timeout(3600):
        while service.ledger.store.number(closed) < groups:
            assert not work.done(), "the worker has ended"
            await asyncio.sleep(1.0)
    await asyncio.gather(*workflow.background)
    rollout.stop()
    await work
    found = service.ledger.store.all(
        "SELECT g.task_key, e.state, COALESCE(e.kind, e.outcome), COALESCE(e.error, ''), e.attempt "
        "FROM episodes e JOIN groups g ON g.id = e.group_id ORDER BY g.task_key, e.idx"
    )
    time_passes.cancel()
    await service.close()
    return found


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workflow, list[tuple[str, str, str, str, int]]]:
    workflow = Workflow()
    folder = tmp_path_factory.mktemp("bad")
    return workflow, run_virtual(lambda: play(folder, workflow), limit_s=1e5)


Played = tuple[Workflow, list[tuple[str, str, str, str, int]]]


@pytest.mark.parametrize("key", BAD)
def test_a_bad_workflow_s_episodes_end_as_they_should(played: Played, key: str) -> None:
    state, how, message = BAD[key]
    found = [each[1:] for each in played[1] if each[0] == key]
    assert [(each[0], each[1]) for each in found] == [(state, how)] * 2, found
    assert all(message in each[2] for each in found), found
    if state == "given_up" and how == "workflow":
        assert {each[3] for each in found} == {2}, "it is tried once more, and no third time"


@pytest.mark.parametrize("key", LINES)
def test_its_message_names_the_line_of_its_author(played: Played, key: str) -> None:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.strip().startswith(LINES[key]))
    for message in (each[3] for each in played[1] if each[0] == key):
        assert f" (test_bad_workflows.py:{number} in " in message, message


def test_others_go_on(played: Played) -> None:
    good = [each[1:3] for each in played[1] if each[0].startswith("good-")]
    assert good == [("done", "completed")] * 2 * GOOD


def test_an_agent_that_outlives_its_episode_is_refused_and_told_so(played: Played) -> None:
    assert len(played[0].refused) == 2 and all("its agents answer no more" in each for each in played[0].refused)
