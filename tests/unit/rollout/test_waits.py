"""What episodes wait for is timed by name: the engine, the grader; and it reaches the worker's report."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from astraflow.errors import GraderFailed
from astraflow.observe.waits import Wait
from astraflow.rewards.limit import TimeLimit
from astraflow.rollout.activity import Activity
from astraflow.rollout.play import WorkflowPlayer
from astraflow.rollout.template import ChatTemplate
from astraflow.rollout.workflow import Agents, Reward
from astraflow.testing.virtual_clock import VirtualClock
from astraflow.testing.virtual_loop import run_virtual
from astraflow.types import FailureKind, Task
from tests.unit.rollout.doubles import END, ScriptedEngine, lease, reply, seat


class SlowEngine(ScriptedEngine):
    async def generate(self, request: Any) -> Any:
        await asyncio.sleep(3.0)
        return await super().generate(request)


async def slow_grade() -> float:
    await asyncio.sleep(5.0)
    return 1.0


def waits(template: ChatTemplate, *, grade_limit_s: float) -> tuple[dict[str, float], Any]:
    async def graded(task: Task, agents: Agents) -> Reward:
        await agents["main"].chat([{"role": "user", "content": "hi"}])
        await asyncio.sleep(7.0)  # the workflow's own time is nobody's wait
        return Reward(await TimeLimit(grade_limit_s).run(slow_grade))

    async def main() -> tuple[dict[str, float], Any]:
        activity = Activity(VirtualClock(asyncio.get_running_loop()))
        engine = SlowEngine(reply([5, END]), reply([5, END]))
        player = WorkflowPlayer(workflow=graded, seats={"main": seat(engine, template)}, waiting=activity.waiting)
        first, second = await asyncio.gather(player(lease(index=0)), player(lease(index=1)))
        assert first.failure == second.failure
        return activity.report({}).metrics, first

    return run_virtual(main)


def test_engine_and_grader_are_timed_apart_and_summed_over_episodes(smollm2: ChatTemplate) -> None:
    metrics, episode = waits(smollm2, grade_limit_s=10.0)
    assert episode.score == 1.0
    named = {name: value for name, value in metrics.items() if name.startswith("wait_s/")}
    assert named == {f"wait_s/{Wait.ENGINE}": pytest.approx(6.0), f"wait_s/{Wait.GRADER}": pytest.approx(10.0)}


def test_a_grader_that_hangs_is_timed_up_to_its_limit(smollm2: ChatTemplate) -> None:
    metrics, episode = waits(smollm2, grade_limit_s=2.0)
    assert episode.failure is FailureKind.GRADER
    assert metrics[f"wait_s/{Wait.GRADER}"] == pytest.approx(4.0)


def test_a_grader_outside_of_an_episode_tells_nobody() -> None:
    async def main() -> float:
        return await TimeLimit(1.0).run(slow_grade)

    with pytest.raises(GraderFailed, match="longer than 1 s"):
        run_virtual(main)
