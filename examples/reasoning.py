"""SmolLM2-135M learns small sums, products and divisors of reasoning-gym, graded by the package's own verifiers.

The families were chosen for a pass@8 well above pass@1 (docs/results.md): there is something to reinforce.
"""

from astraflow.rewards.answer import last_number
from astraflow.rewards.reasoning import ReasoningGrade
from astraflow.rollout.settings import RolloutSettings
from astraflow.run.recipe import Eval, Policy, Recipe
from astraflow.tasks.held_out import held_out
from astraflow.tasks.mixture import Mixture
from astraflow.trainer.settings import TrainerSettings
from astraflow.types import Sampling, Task
from astraflow.workflows.reasoning import reasoning_tasks
from astraflow.workflows.single_turn import SingleTurn

SIZE = 10_000


def question(task: Task) -> str:
    return f"{task.payload['question'].strip()} Reply with only the number."


def first_line_number(text: str) -> str | None:
    """What counts as the answer: the last number of the reply's first line."""
    return last_number(text.strip().partition("\n")[0])


def recipe() -> Recipe:
    products = reasoning_tasks("products", size=SIZE, min_digits=1, max_digits=1)
    sums = reasoning_tasks("chain_sum", size=SIZE, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    divisors = reasoning_tasks("gcd", size=SIZE, min_numbers=2, max_numbers=2, min_value=2, max_value=30)
    split = held_out(Mixture("small-numbers", [(products, 2), (sums, 2), (divisors, 1)]), count=100, fraction=0.2)
    return Recipe(
        name="reasoning",
        policies={"main": Policy(model="smollm2", groups_per_batch=8, trainer=TrainerSettings(lr=2e-5))},
        workflow=SingleTurn(ReasoningGrade(extract=first_line_number, threshold=1.0), ask=question),
        tasks=split.train,
        eval=Eval(tasks=split.held_out, count=100, every=20),
        sampling=Sampling(max_tokens=12),
        rollout=RolloutSettings(slots=64),
        group_size=8,
        steps=50,
    )
