"""A 0.4 M-parameter model in seconds: first it is shown any of three digits, then rewarded for the largest.

Supervised rows and reinforcement go through the same dataflow: `Stages` says which tasks come first.
"""

import random

from astraflow.algorithms.credit import GroupMean
from astraflow.algorithms.curate import Shuffled, Stage, Stages
from astraflow.algorithms.pace import BoundedStaleness
from astraflow.algorithms.pipeline import Pipeline
from astraflow.algorithms.select import EarliestDeadline
from astraflow.rollout.settings import RolloutSettings
from astraflow.rollout.workflow import Agents, Reward
from astraflow.run.recipe import Eval, Policy, Recipe
from astraflow.run.tiny_model import TinyModel
from astraflow.tasks.generated import GeneratedTasks
from astraflow.tasks.held_out import held_out
from astraflow.trainer.settings import TrainerSettings
from astraflow.types import Sampling, Task

WARM_UP_STEPS = 200
GROUPS = 16
MODEL = TinyModel(hidden=128, layers=2, intermediate=384, context=64, characters="0123456789 ")


def numbers(index: int) -> list[int]:
    return random.Random(f"tiny/{index}").sample(range(10), 3)


def question(index: int) -> Task:
    chosen = numbers(index)
    return Task(key=" ".join(map(str, chosen)), payload={"numbers": chosen})


def demonstration(task: Task) -> Task:
    """Any of the three: the model learns to answer with one of them, not which."""
    shown = random.Random(f"shown/{task.key}").choice(task.payload["numbers"])
    messages = [{"role": "user", "content": task.key}, {"role": "assistant", "content": str(shown)}]
    return Task(key=task.key, workflow="supervised", payload={"policy": "main", "messages": messages})


async def largest(task: Task, agents: Agents) -> Reward:
    reply = await agents["main"].chat([{"role": "user", "content": task.key}])
    return Reward(float(reply.text == str(max(task.payload["numbers"]))))


def stages(recipe: Recipe) -> Pipeline:
    shown = GeneratedTasks("demonstrations", lambda index: demonstration(recipe.tasks.task(index)))
    warm_up = Stage(curate=Shuffled(shown, group_size=1), groups=WARM_UP_STEPS * GROUPS)
    reinforced = Stage(curate=Shuffled(recipe.tasks, group_size=recipe.group_size, seed=recipe.seed))
    return Pipeline(
        curate=Stages([warm_up, reinforced]),
        pace=BoundedStaleness(),
        credit=GroupMean(std=True),
        select=EarliestDeadline(),
    )


def recipe() -> Recipe:
    split = held_out(GeneratedTasks("largest-of-three", question), count=60, fraction=0.1)
    trainer = TrainerSettings(lr=4e-4, lr_supervised=2e-3, betas=(0.9, 0.95), dtype="float32")
    return Recipe(
        name="tiny",
        policies={"main": Policy(model=MODEL, groups_per_batch=GROUPS, trainer=trainer)},
        workflow=largest,
        tasks=split.train,
        pipeline=stages,
        eval=Eval(tasks=split.held_out, count=60, every=WARM_UP_STEPS),
        sampling=Sampling(max_tokens=3),
        rollout=RolloutSettings(slots=64),
        group_size=8,
        steps=WARM_UP_STEPS + 60,
    )
