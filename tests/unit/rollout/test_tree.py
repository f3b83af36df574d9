"""Agents that spawn agents: the tree is recorded, bounded, the same in a re-run, and never waits for itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from astraflow.errors import ConfigError, SpawnRefused
from astraflow.rollout.agents import call_seed
from astraflow.rollout.play import WorkflowPlayer
from astraflow.rollout.settings import TreeLimits
from astraflow.rollout.workflow import Agent, Agents, Reward
from astraflow.testing.check_workflow import character_template
from astraflow.testing.fake_engine import FakeEngine
from astraflow.testing.virtual_loop import run_virtual
from astraflow.types import Episode, FailureKind, Manifest, Outcome, Task
from tests.unit.rollout.doubles import lease, seat

HI = {"role": "user", "content": "hi"}


async def played(workflow: Any, *, slots: int = 2, tree: TreeLimits | None = None, **fields: Any) -> Episode:
    engine = FakeEngine(slots=slots, vocabulary=64, tick_s=0.01, end_chance=0.5)
    await engine.load(Manifest(policy="policy", version=0, digest="d", files=(), serial=1), [])
    limits = {"tree": tree} if tree is not None else {}
    player = WorkflowPlayer(
        workflow=workflow,
        seats={"main": seat(engine, character_template(), policy="policy", max_tokens=64)},
        **limits,
        **fields,
    )
    async with asyncio.timeout(3600):
        episode = await player(lease())
    assert engine.busy == engine.waiting == 0, "an agent was left behind"
    return episode


def parents(episode: Episode) -> dict[str, int | None]:
    return {each.agent: each.turns[0].parent for each in episode.trajectories}


def test_a_child_hangs_below_the_turn_of_the_agent_that_made_it() -> None:
    """Also where another agent has spoken in between, and where the child itself spawns before it has spoken."""

    async def family(task: Task, agents: Agents) -> Reward:
        root = agents["main"]
        await root.chat([HI])
        first, second = root.spawn("main"), root.spawn("main")
        await first.chat([HI])
        await second.chat([HI])
        await first.spawn("main").chat([HI])
        await second.spawn("main").spawn("main").chat([HI])
        await root.chat([HI])
        await root.spawn("main").chat([HI])
        return Reward(1.0)

    episode = run_virtual(lambda: played(family))
    assert episode.outcome is Outcome.COMPLETED, episode.error
    assert parents(episode) == {"main": None, "main#2": 0, "main#3": 0, "main#4": 1, "main#6": 2, "main#7": 5}


@pytest.mark.parametrize("slots", [1, 2, 64])
def test_f83_a_tree_on_few_slots_ends_whatever_its_shape(slots: int) -> None:
    async def solve(agent: Agent, depth: int) -> int:
        await agent.chat([HI])
        if depth == 3:
            return 1
        children = [agent.spawn("main") for _ in range(3)]
        return 1 + sum(await asyncio.gather(*(solve(child, depth + 1) for child in children)))

    async def tree(task: Task, agents: Agents) -> Reward:
        assert await solve(agents["main"], 0) == 1 + 3 + 9 + 27
        return Reward(1.0)

    episode = run_virtual(lambda: played(tree, slots=slots))
    assert episode.outcome is Outcome.COMPLETED, episode.error
    assert len(episode.trajectories) == 40


@pytest.mark.parametrize("slots", [1, 3, 64])
def test_tokens_of_a_tree_are_the_same_however_its_agents_overtake_each_other(slots: int) -> None:
    async def tree(task: Task, agents: Agents) -> Reward:
        root = agents["main"]
        await root.chat([HI])
        children = [root.spawn("main") for _ in range(4)]
        said = await asyncio.gather(*(child.chat([HI]) for child in children))
        found.append(tuple(reply.tokens for reply in said))
        return Reward(1.0)

    found: list[Any] = []
    run_virtual(lambda: played(tree, slots=slots))
    run_virtual(lambda: played(tree, slots=64))
    assert found[0] == found[1]
    assert len(set(found[0])) > 1
    assert call_seed(7, "main", 1) != call_seed(7, "main/main#0", 1) != call_seed(7, "main/main#1", 1)


async def spawns_for_ever(agent: Agent) -> None:
    await agent.chat([HI])
    await spawns_for_ever(agent.spawn("main"))


async def without_end(task: Task, agents: Agents) -> Reward:
    await spawns_for_ever(agents["main"])
    return Reward(1.0)


async def many_children(task: Task, agents: Agents) -> Reward:
    await agents["main"].chat([HI])
    children = [agents["main"].spawn("main") for _ in range(1000)]
    await asyncio.gather(*(child.chat([HI]) for child in children))
    return Reward(1.0)


async def many_agents(task: Task, agents: Agents) -> Reward:
    while True:
        await agents.spawn("main").chat([HI])


@pytest.mark.parametrize(
    ("workflow", "limits", "words"),
    [
        (without_end, TreeLimits(depth=5), "main#6 may not spawn 'main': the limit of depth is 5"),
        (many_children, TreeLimits(children=7), "main may not spawn 'main': the limit of children is 7"),
        (many_agents, TreeLimits(agents=9), "the limit of 9 agents an episode was reached"),
        (without_end, TreeLimits(depth=0), "main may not spawn 'main': the limit of depth is 0"),
        (without_end, TreeLimits(depth=500, agents=500), "the limit of 64 turns was reached"),
    ],
)
def test_what_spawns_without_end_is_truncated_by_name(workflow: Any, limits: TreeLimits, words: str) -> None:
    episode = run_virtual(lambda: played(workflow, tree=limits))
    assert (episode.outcome, episode.error) == (Outcome.TRUNCATED, words)
    assert all(turn.reward is None for each in episode.trajectories for turn in each.turns)


def test_who_catches_the_refusal_goes_on_without_and_is_graded() -> None:
    async def careful(task: Task, agents: Agents) -> Reward:
        agent: Agent = agents["main"]
        depth = 0
        while True:
            await agent.chat([HI])
            try:
                agent = agent.spawn("main")
            except SpawnRefused:
                return Reward(float(depth))
            depth += 1

    episode = run_virtual(lambda: played(careful, tree=TreeLimits(depth=3)))
    assert (episode.outcome, episode.score, len(episode.trajectories)) == (Outcome.COMPLETED, 3.0, 4)


def test_recursion_without_agents_is_the_workflow_s_failure() -> None:
    async def recurses(task: Task, agents: Agents) -> Reward:
        return await recurses(task, agents)

    episode = run_virtual(lambda: played(recurses))
    assert (episode.outcome, episode.failure) == (Outcome.FAILED, FailureKind.WORKFLOW)
    assert "RecursionError" in str(episode.error)


def test_f81_a_child_that_fails_takes_its_siblings_with_it_and_leaves_nobody_behind() -> None:
    async def one_fails(task: Task, agents: Agents) -> Reward:
        async def child(number: int) -> None:
            agent = agents["main"].spawn("main")
            await agent.chat([HI])
            if number == 1:
                raise ValueError("child 1 broke")
            await agent.chat([HI])

        await agents["main"].chat([HI])
        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(child(number))
        return Reward(1.0)

    episode = run_virtual(lambda: played(one_fails, slots=4))
    assert episode.failure is FailureKind.WORKFLOW
    assert "child 1 broke" in str(episode.error)


def test_an_unknown_role_is_named_also_when_it_is_spawned() -> None:
    async def unknown(task: Task, agents: Agents) -> Reward:
        await agents["main"].chat([HI])
        await agents["main"].spawn("mian").chat([HI])
        return Reward(1.0)

    episode = run_virtual(lambda: played(unknown))
    assert episode.failure is FailureKind.WORKFLOW
    assert "no role 'mian'; the recipe's roles: main" in str(episode.error)


@pytest.mark.parametrize(("name", "value"), [("agents", 0), ("depth", -1), ("children", -1)])
def test_limits_out_of_range_are_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"TreeLimits.{name} must be at least .*found {value}"):
        TreeLimits(**{name: value})
