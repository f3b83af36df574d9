"""The kit of workflows finds what it promises to find."""

from __future__ import annotations

import random
from typing import Any

import pytest

from astraflow.errors import EpisodeError
from astraflow.rollout.workflow import Agents, Reward
from astraflow.testing.check_workflow import check_workflow
from astraflow.types import Task

TASK = Task(key="t")
HI = {"role": "user", "content": "hi"}


async def duel(task: Task, agents: Agents) -> Reward:
    first = await agents["solver"].chat([HI])
    second = await agents["verifier"].chat([HI, {"role": "assistant", "content": first.text}, HI])
    return Reward(solver=float(len(first.text)), verifier=float(len(second.text)))


async def raises(task: Task, agents: Agents) -> Reward:
    raise ValueError("a bug")


async def silent(task: Task, agents: Agents) -> Reward:
    return Reward(1.0)


async def hides_the_engine_s_failure(task: Task, agents: Agents) -> Reward:
    try:
        await agents["main"].chat([HI])
    except EpisodeError:
        return Reward(0.0)
    return Reward(1.0)


async def draws(task: Task, agents: Agents) -> Reward:
    await agents["main"].chat([{"role": "user", "content": str(random.random())}])
    return Reward(random.random())


def test_a_good_workflow_passes() -> None:
    check_workflow(duel, TASK, roles=("solver", "verifier"))


@pytest.mark.parametrize(
    ("workflow", "said"),
    [
        (raises, "a plain episode failed: workflow: ValueError: a bug"),
        (silent, "no agent was asked"),
        (hides_the_engine_s_failure, "an engine that fails gave an episode"),
        (draws, "two episodes of one seed differ"),
    ],
)
def test_a_bad_workflow_is_named(workflow: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_workflow(workflow, TASK)
