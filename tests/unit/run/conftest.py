"""A recipe that needs no model on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from astraflow.rollout.workflow import Agents, Reward
from astraflow.run.recipe import Eval, Policy, Recipe
from astraflow.run.tiny_model import TinyModel
from astraflow.tasks.generated import GeneratedTasks
from astraflow.tasks.held_out import held_out
from astraflow.types import Sampling, Task


async def echo(task: Task, agents: Agents) -> Reward:
    reply = await agents["main"].chat([{"role": "user", "content": task.key}])
    return Reward(float(reply.text == task.key))


def make(index: int) -> Task:
    return Task(key=f"task-{index}", payload={"n": index})


@pytest.fixture
def recipe_with() -> Callable[..., Recipe]:
    split = held_out(GeneratedTasks("numbers", make), count=10)

    def build(**changes: Any) -> Recipe:
        common: dict[str, Any] = {
            "name": "unit",
            "policies": {"main": Policy(model=TinyModel())},
            "workflow": echo,
            "tasks": split.train,
            "eval": Eval(tasks=split.held_out, count=10),
            "sampling": Sampling(max_tokens=8),
            "steps": 10,
        }
        return Recipe(**{**common, **changes})

    return build
