"""SmolLM2-135M learns on two CPU cores to answer with "the largest of three numbers, only the number"."""

# fmt: off
import random

from astraflow.rollout.workflow import Agents, Reward
from astraflow.run.recipe import Eval, Policy, Recipe
from astraflow.tasks.generated import GeneratedTasks
from astraflow.tasks.held_out import held_out
from astraflow.trainer.settings import TrainerSettings
from astraflow.types import Sampling, Task

ASK = "Answer with only the number. What is the {}"
SHOWN = [{"role": "user", "content": ASK.format("sum of 120, 30, 210?")}, {"role": "assistant", "content": "360"}]
COLUMN = "largest of these?\n{:>3}\n{:>3}\n{:>3}"  # right-aligned: a number's length is seen before its first digit

def numbers(index: int) -> Task:
    chosen = random.Random(f"largest/{index}").sample(range(10, 1000), 3)
    return Task(key=" ".join(map(str, chosen)), payload={"numbers": chosen})

async def largest(task: Task, agents: Agents) -> Reward:
    question = ASK.format(COLUMN.format(*task.payload["numbers"]))
    reply = await agents["main"].chat([*SHOWN, {"role": "user", "content": question}])
    return Reward(float(reply.text.strip() == str(max(task.payload["numbers"]))))

def recipe() -> Recipe:
    split = held_out(GeneratedTasks("largest-of-three", numbers), count=200)
    main = Policy(model="smollm2", trainer=TrainerSettings(lr=3e-5, checkpoint_every=20))
    return Recipe(name="quickstart", policies={"main": main}, workflow=largest, tasks=split.train, steps=32,
                  eval=Eval(tasks=split.held_out, count=200), sampling=Sampling(max_tokens=8))
