"""Two models of 0.4 M parameters are trained together: a solver names the largest of three digits, a verifier says
whether that is right. Each has a trainer, batches and versions of its own; neither waits for the other.

First the solver is shown any of the three digits, and the verifier verdicts, one in eight of them false: shown any
verdict, it soon says "n" to everything. Then the solver is rewarded for the largest digit, the verifier for the truth.
"""

import random

from astraflow.algorithms.credit import GroupMean
from astraflow.algorithms.curate import Shuffled, Stage, Stages
from astraflow.algorithms.keep import DropZeroVariance
from astraflow.algorithms.pace import BoundedStaleness
from astraflow.algorithms.pipeline import Pipeline
from astraflow.algorithms.select import EarliestDeadline
from astraflow.rewards.exact import Exact
from astraflow.rollout.settings import RolloutSettings
from astraflow.run.recipe import Eval, Policy, Recipe
from astraflow.run.tiny_model import TinyModel
from astraflow.tasks.generated import GeneratedTasks
from astraflow.tasks.held_out import held_out
from astraflow.trainer.settings import TrainerSettings
from astraflow.types import Sampling, Task
from astraflow.workflows.solve_and_verify import SolveAndVerify

MODEL = TinyModel(hidden=128, layers=2, intermediate=384, context=64, characters="0123456789 ?yn")
WARM_UP_STEPS = 100
GROUPS = 8
CHECK = "{question} {answer}?"


def question(index: int) -> Task:
    digits = random.Random(f"two/{index}").sample(range(10), 3)
    text = " ".join(map(str, digits))
    return Task(key=text, payload={"prompt": text, "answer": max(digits)})


def shown(index: int) -> Task:
    """A row for each in turn: to the solver any of the three digits, to the verifier a verdict on any of them."""
    draw = random.Random(f"shown/{index}")
    asked = question(index).key
    policy, text, reply = "solver", asked, draw.choice(asked.split())
    if index % 2:
        true = "y" if int(reply) == max(map(int, asked.split())) else "n"
        verdict = true if draw.random() < 0.75 else draw.choice("yn")
        policy, text, reply = "verifier", CHECK.format(question=asked, answer=reply), verdict
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]
    return Task(key=f"{policy} {text}", workflow="supervised", payload={"policy": policy, "messages": messages})


def stages(recipe: Recipe) -> Pipeline:
    rows = WARM_UP_STEPS * GROUPS * len(recipe.policies)
    warm_up = Stage(curate=Shuffled(GeneratedTasks("shown", shown), group_size=1), groups=rows)
    reinforced = Stage(curate=Shuffled(recipe.tasks, group_size=recipe.group_size, seed=recipe.seed))
    return Pipeline(
        curate=Stages([warm_up, reinforced]),
        pace=BoundedStaleness(),
        credit=GroupMean(std=True),
        keep=(DropZeroVariance(),),
        select=EarliestDeadline(),
    )


def policy(lr: float) -> Policy:
    trainer = TrainerSettings(lr=lr, lr_supervised=2e-3, betas=(0.9, 0.95), dtype="float32")
    return Policy(model=MODEL, groups_per_batch=GROUPS, trainer=trainer)


def recipe() -> Recipe:
    split = held_out(GeneratedTasks("largest-of-three", question), count=60, fraction=0.1)
    return Recipe(
        name="two-policies",
        policies={"solver": policy(4e-4), "verifier": policy(8e-4)},
        workflow=SolveAndVerify(Exact(), words=("y", "n"), check=CHECK),
        tasks=split.train,
        pipeline=stages,
        eval=Eval(tasks=split.held_out, count=60, every=WARM_UP_STEPS),
        sampling=Sampling(max_tokens=3),
        rollout=RolloutSettings(slots=64),
        group_size=8,
        steps=WARM_UP_STEPS + 100,
    )
