"""SmolLM2-135M learns on two CPU cores to answer with "the largest of three numbers, only the number"."""

import random

from astraflow.rollout.settings import RolloutSettings
from astraflow.rollout.workflow import Agents, Reward
from astraflow.run.recipe import Eval, Policy, Recipe
from astraflow.tasks.generated import GeneratedTasks
from astraflow.tasks.held_out import held_out
from astraflow.trainer.settings import TrainerSettings
from astraflow.types import Sampling, Task


def numbers(index: int) -> Task:
    chosen = random.Random(f"largest/{index}").sample(range(10, 1000), 3)
    return Task(key=" ".join(map(str, chosen)), payload={"numbers": chosen})


SHOWN = [
    {"role": "user", "content": "What is 2 + 3? Answer with only the number."},
    {"role": "assistant", "content": "5"},
]


async def largest(task: Task, agents: Agents) -> Reward:
    a, b, c = task.payload["numbers"]
    question = f"What is the largest of {a}, {b}, {c}? Answer with only the number."
    reply = await agents["main"].chat([*SHOWN, {"role": "user", "content": question}])
    return Reward(float(reply.text.strip() == str(max(a, b, c))))


def recipe() -> Recipe:
    split = held_out(GeneratedTasks("largest-of-three", numbers), count=200)
    main = Policy(model="smollm2", groups_per_batch=8, trainer=TrainerSettings(lr=3e-5, threads=2, checkpoint_every=20))
    test = Eval(tasks=split.held_out, count=200)
    return Recipe(name="quickstart", policies={"main": main}, workflow=largest, tasks=split.train, eval=test,
                  sampling=Sampling(max_tokens=8), rollout=RolloutSettings(slots=64), group_size=8, steps=60)  # fmt: skip
