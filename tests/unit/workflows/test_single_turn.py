"""One question, one answer, one grade."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from astraflow.rewards.answer import has_answer
from astraflow.rewards.exact import Exact
from astraflow.rollout.play import WorkflowPlayer
from astraflow.testing.check_workflow import character_template, check_workflow
from astraflow.testing.fake_engine import FakeEngine
from astraflow.testing.virtual_loop import run_virtual
from astraflow.types import Episode, FailureKind, Lease, Manifest, Outcome, Sampling, Task
from astraflow.workflows.single_turn import SingleTurn
from tests.unit.rollout.doubles import seat

TASK = Task(key="t", payload={"prompt": "1 + 1?", "answer": "2"})


async def played(workflow: Any) -> Episode:
    engine = FakeEngine(vocabulary=40)
    await engine.load(Manifest(policy="policy", version=0, digest="d", files=(), serial=1), [])
    player = WorkflowPlayer(workflow=workflow, seats={"main": seat(engine, character_template(), policy="policy")})
    return await player(Lease(group=1, index=0, attempt=1, task=TASK))


def test_it_keeps_the_promises_of_a_workflow() -> None:
    check_workflow(SingleTurn(Exact()), TASK)
    check_workflow(SingleTurn(Exact(), system="be brief", role="solver"), TASK, roles=("solver",))


def test_the_grade_is_the_reward() -> None:
    assert run_virtual(lambda: played(SingleTurn(lambda text, task: 0.25))).score == 0.25

    async def grade(text: str, task: Task) -> float:
        await asyncio.sleep(1)
        return float(task.payload["answer"])

    assert run_virtual(lambda: played(SingleTurn(grade))).score == 2.0


def test_f12_no_opinion_is_not_scored() -> None:
    episode = run_virtual(lambda: played(SingleTurn(lambda text, task: None)))
    assert episode.outcome is not Outcome.FAILED and episode.score is None
    assert [turn.reward for turn in episode.trajectories[0].turns] == [None]


def test_f13_a_grader_that_raises_is_no_wrong_answer() -> None:
    def down(text: str, task: Task) -> float:
        raise ConnectionError("503")

    episode = run_virtual(lambda: played(SingleTurn(down)))
    assert episode.failure is FailureKind.GRADER and episode.score is None
    assert "ConnectionError: 503" in str(episode.error)


def test_a_grader_that_hangs_is_no_wrong_answer() -> None:
    async def hangs(text: str, task: Task) -> float:
        await asyncio.Event().wait()
        return 0.0

    episode = run_virtual(lambda: played(SingleTurn(hangs, grade_limit_s=3.0)))
    assert episode.failure is FailureKind.GRADER and "longer than 3 s" in str(episode.error)


def test_messages_are_what_the_recipe_asks() -> None:
    assert SingleTurn(Exact(), system="s").messages(TASK) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "1 + 1?"},
    ]
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert SingleTurn(Exact(), ask=lambda task: asked).messages(TASK) == asked


def test_a_task_without_a_prompt_is_the_workflow_s_failure() -> None:
    async def main() -> Episode:
        player = WorkflowPlayer(workflow=SingleTurn(Exact()), seats={})
        return await player(Lease(group=1, index=0, attempt=1, task=Task(key="t")))

    assert run_virtual(main).failure is FailureKind.WORKFLOW


@pytest.mark.parametrize("tokens", [1, 4])
def test_max_tokens_of_the_recipe_holds(tokens: int) -> None:
    async def main() -> Episode:
        engine = FakeEngine(vocabulary=40, end_chance=0.0)
        await engine.load(Manifest(policy="policy", version=0, digest="d", files=(), serial=1), [])
        one = seat(engine, character_template(), policy="policy", max_tokens=tokens)
        assert one.sampling == Sampling(max_tokens=tokens)
        player = WorkflowPlayer(workflow=SingleTurn(Exact()), seats={"main": one})
        return await player(Lease(group=1, index=0, attempt=1, task=TASK))

    episode = run_virtual(main)
    assert episode.outcome is Outcome.TRUNCATED
    assert episode.trajectories[0].samples[0].sampled.sum() == tokens


def test_the_form_of_a_reply_is_told_beside_its_grade() -> None:
    for text_is_fine in (True, False):
        workflow = SingleTurn(lambda text, task: 0.5, form=lambda text, fine=text_is_fine: fine)
        episode = run_virtual(lambda workflow=workflow: played(workflow))
        assert episode.features["format"].tolist() == float(text_is_fine)
        assert episode.score == 0.5
    assert "format" not in run_virtual(lambda: played(SingleTurn(Exact()))).features
    assert (has_answer("so \\boxed{2}"), has_answer("so 2")) == (True, False)
