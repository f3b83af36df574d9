"""``sys.exit`` in a task that a workflow made ends its episode, never the worker with all its others."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from astraflow.rollout.workflow import Agents, Reward
from astraflow.testing.check_workflow import character_template
from astraflow.testing.virtual_loop import run_virtual
from astraflow.types import Episode, FailureKind, Outcome, Task
from tests.unit.rollout.doubles import END, ScriptedEngine, play, reply

HI = {"role": "user", "content": "hi"}


async def one_turn(task: Task, agents: Agents) -> Reward:
    await agents["main"].chat([HI])
    return Reward(1.0)


async def played(workflow: Any) -> Episode:
    return await play(workflow, ScriptedEngine(reply([5, END])), character_template())


async def leave_later(code: int) -> None:
    await asyncio.sleep(1.0)
    sys.exit(code)


async def by_gather(agents: Agents) -> None:
    await asyncio.gather(agents["main"].chat([HI]), leave_later(3))


async def by_gather_that_looks_away(agents: Agents) -> None:
    await asyncio.gather(leave_later(3), return_exceptions=True)


async def by_group(agents: Agents) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(leave_later(3))
        tasks.create_task(asyncio.sleep(500))


async def by_a_task_of_a_task(agents: Agents) -> None:
    await asyncio.create_task(asyncio.wait_for(leave_later(3), 5.0))


async def by_nobody(agents: Agents) -> None:
    held = asyncio.create_task(leave_later(3))
    await asyncio.sleep(2.0)
    assert held.done(), "never reached: the episode is over"


async def while_it_is_cancelled(agents: Agents) -> None:
    async def leaves_late() -> None:
        try:
            await asyncio.sleep(500)
        finally:
            sys.exit(3)

    await asyncio.wait_for(leaves_late(), 1.0)


@pytest.mark.parametrize(
    "how", [by_gather, by_gather_that_looks_away, by_group, by_a_task_of_a_task, by_nobody, while_it_is_cancelled]
)
def test_a_task_of_a_workflow_that_ends_the_process_ends_its_episode_only(how: Any) -> None:
    """However it was made, and whether somebody looks at it or not; the episode beside it goes on."""

    async def leaves(task: Task, agents: Agents) -> Reward:
        await how(agents)
        return Reward(1.0)

    async def stays(task: Task, agents: Agents) -> Reward:
        await asyncio.gather(agents["main"].chat([HI]), asyncio.sleep(5.0))
        return Reward(1.0)

    async def both() -> list[Episode]:
        return await asyncio.gather(*(played(each) for each in (leaves, stays)))

    left, stayed = run_virtual(both)
    assert (left.outcome, left.failure, left.score) == (Outcome.FAILED, FailureKind.WORKFLOW, None)
    assert left.error is not None and left.error.startswith("SystemExit: 3 (test_exits.py:")
    assert (stayed.outcome, stayed.score) == (Outcome.COMPLETED, 1.0)


def test_a_time_limit_of_the_workflow_s_own_is_named_and_not_that_something_was_cancelled() -> None:
    async def hurries(task: Task, agents: Agents) -> Reward:
        await asyncio.wait_for(asyncio.sleep(500), 1.0)
        return Reward(1.0)

    error = run_virtual(lambda: played(hurries)).error
    assert error is not None and error.startswith("TimeoutError: ")


def test_a_task_outside_of_a_workflow_may_still_end_the_process() -> None:
    async def main() -> None:
        await played(one_turn)
        await asyncio.create_task(leave_later(4))

    with pytest.raises(SystemExit) as caught:
        asyncio.run(main())
    assert caught.value.code == 4
