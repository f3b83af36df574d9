"""Two models of 0.4 M parameters are trained together: a solver names the largest of three digits, a verifier says
whether that is right. Each has a trainer, batches and versions of its own; neither waits for the other.

First both are shown answers of which half are the largest digit: the solver to give them, the verifier with verdicts,
one in seven false. Then each is rewarded, the solver slowly: a verifier that sees few right answers, or few wrong ones,
soon says the same to all. On held-out tasks one that always says "y" is right as often as the solver.
"""

import random

from astraflow.algorithms.credit import GroupMean
from astraflow.algorithms.curate import Shuffled, Stage, Stages
from astraflow.algorithms.keep import DropZeroVariance
from astraflow.algorithms.pace import BoundedStaleness
from astraflow.algorithms.pipeline import Pipeline
from astraflow.algorithms.select import EarliestDeadline
from astraflow.dataflow.settings import Limits
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
WARM_UP_STEPS = 250
GROUPS = 8
SAMPLING = Sampling(max_tokens=3)
CHECK = "{question} {answer}?"


def question(index: int) -> Task:
    digits = random.Random(f"two/{index}").sample(range(10), 3)
    text = " ".join(map(str, digits))
    return Task(key=text, payload={"prompt": text, "answer": max(digits)})


SPLIT = held_out(GeneratedTasks("largest-of-three", question), count=60, fraction=0.1)


def shown(index: int) -> Task:
    """A row for each in turn: to the solver an answer, to the verifier a verdict on one."""
    draw = random.Random(f"shown/{index}")
    asked = SPLIT.train.task(index).key
    largest = max(asked.split())
    answer = largest if draw.random() < 0.25 else draw.choice(asked.split())
    policy, text, reply = "solver", asked, answer
    if index % 2:
        true, false = "yn" if answer == largest else "ny"
        reply = true if draw.random() < 0.85 else false
        policy, text = "verifier", CHECK.format(question=asked, answer=answer)
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
    return Recipe(
        name="two-policies",
        policies={"solver": policy(7e-5), "verifier": policy(3e-4)},
        workflow=SolveAndVerify(Exact(), words=("y", "n"), check=CHECK),
        tasks=SPLIT.train,
        pipeline=stages,
        eval=Eval(tasks=SPLIT.held_out, count=60, every=50, sampling=SAMPLING, policy="verifier"),
        sampling=SAMPLING,
        rollout=RolloutSettings(slots=64),
        group_size=8,
        steps=WARM_UP_STEPS + 100,
        limits=Limits(retain="all"),
    )
