"""What the pools of the bench play: turns of the tiny model with a pause after each, longer on a slower machine.

How fast a machine is, is in its environment; nobody else is told. Rewards are drawn from what was said: nothing is to
be learned, so that groups keep their signal for as many steps as are asked for.
"""

from __future__ import annotations

import asyncio
import os
import zlib

from astraflow.dataflow.settings import Limits
from astraflow.rollout.settings import RolloutSettings
from astraflow.rollout.workflow import Agents, Reward
from astraflow.run.recipe import Policy, Recipe
from astraflow.run.tiny_model import TinyModel
from astraflow.tasks.lists import ListTasks
from astraflow.trainer.settings import TrainerSettings
from astraflow.types import Sampling, Task

SPEED = "ASTRAFLOW_BENCH_SPEED"
PAUSE_S = 0.1
"""After each sampled token, at full speed."""
MODEL = TinyModel(hidden=128, layers=2, intermediate=384, context=64, characters="0123456789 ")
TURNS = (1, 1, 1, 1, 2, 2, 3, 8)
"""Of a task, by its number: one in eight is long."""
TASKS = 64


async def paced(task: Task, agents: Agents) -> Reward:
    pause_s = PAUSE_S / float(os.environ.get(SPEED, "1"))
    said = []
    for turn in range(task.payload["turns"]):
        reply = await agents["main"].chat([{"role": "user", "content": f"{task.key} {turn}"}])
        await asyncio.sleep(pause_s * len(reply.tokens))
        said.append(tuple(reply.tokens))
    return Reward(float(zlib.crc32(repr((task.key, said)).encode()) % 2))


def recipe() -> Recipe:
    tasks = [Task(key=str(n), dataset="pools", payload={"turns": TURNS[n % len(TURNS)]}) for n in range(TASKS)]
    trainer = TrainerSettings(lr=1e-3, dtype="float32")
    policy = Policy(model=MODEL, groups_per_batch=4, max_staleness=6, keep_every=1, trainer=trainer)
    return Recipe(
        name="pools",
        policies={"main": policy},
        workflow=paced,
        tasks=ListTasks("pools", tasks),
        sampling=Sampling(max_tokens=4),
        rollout=RolloutSettings(slots=4),
        limits=Limits(retain="all"),
        group_size=4,
        steps=40,
        regions=("home", "eu", "us"),
    )
