"""Tasks of reasoning-gym, graded by its own verifiers."""

from __future__ import annotations

import msgspec
import pytest

from astraflow.errors import ConfigError, GraderFailed
from astraflow.rewards.reasoning import ReasoningGrade, dataset
from astraflow.testing.check_reward import check_reward
from astraflow.types import Task
from astraflow.wire.codec import decode, encode
from astraflow.workflows.reasoning import reasoning_tasks

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def gold(task: Task) -> str:
    source = task.payload
    return str(
        dataset(source["family"], msgspec.json.encode(source["config"]), source["seed"])[source["index"]]["answer"]
    )


@pytest.mark.parametrize(
    "family", ["chain_sum", "products", "gcd", "leg_counting", "spell_backward", "simple_equations", "count_bits"]
)
def test_the_gold_answer_scores_one(family: str) -> None:
    source = reasoning_tasks(family, size=20)
    for index in range(0, 20, 5):
        task = source.task(index)
        check_reward(
            ReasoningGrade(threshold=1.0), task, right=[f"so \\boxed{{{gold(task)}}}"], wrong=["\\boxed{nothing}"]
        )


def test_tasks_cross_the_wire_without_their_answer() -> None:
    task = reasoning_tasks("chain_sum", **SUMS).task(7)
    assert decode(encode(task), Task) == task
    assert set(task.payload) == {"family", "config", "seed", "index", "question"}


def test_equal_questions_have_equal_keys() -> None:
    source = reasoning_tasks("products", size=400, min_digits=1, max_digits=1)
    by_question: dict[str, set[str]] = {}
    for index in range(400):
        task = source.task(index)
        by_question.setdefault(task.payload["question"], set()).add(task.key)
    assert len(by_question) <= 100 and all(len(keys) == 1 for keys in by_question.values())


def test_partial_credit_is_kept_or_cut() -> None:
    task = reasoning_tasks("chain_sum", **SUMS).task(7)
    near = f"<answer>{gold(task)} or so</answer>"
    assert 0 < ReasoningGrade()(near, task) < 1
    assert ReasoningGrade(threshold=1.0)(near, task) == 0.0


def test_another_package_s_task_is_a_failure_and_no_zero() -> None:
    task = reasoning_tasks("chain_sum", **SUMS).task(7)
    other = msgspec.structs.replace(task, payload={**task.payload, "question": "what?"})
    with pytest.raises(GraderFailed, match="another version"):
        ReasoningGrade()("<answer>1</answer>", other)


def test_unknown_families_and_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="no family 'chain_sums'"):
        reasoning_tasks("chain_sums")
    with pytest.raises(ConfigError, match="refuses"):
        reasoning_tasks("chain_sum", min_term=2)
    with pytest.raises(ConfigError, match="refuses"):
        reasoning_tasks("chain_sum", min_terms=5, max_terms=2)
