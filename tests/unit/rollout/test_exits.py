"""Whatever a workflow or a task of it raises, ``sys.exit`` too, ends its episode, never the worker with all others."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from astraflow.rewards.limit import TimeLimit
from astraflow.rollout.workflow import Agents, Reward
from astraflow.testing.check_workflow import character_template
from astraflow.testing.virtual_loop import run_virtual
from astraflow.types import Episode, FailureKind, Outcome, Task
from astraflow.wire.codec import decode, encode
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


class Odd(BaseException):
    pass


def raising(error: BaseException) -> Any:
    async def later() -> None:
        await asyncio.sleep(1.0)
        raise error

    return later


async def itself(later: Any) -> None:
    await later()


async def in_a_task(later: Any) -> None:
    await asyncio.create_task(later())


async def in_a_group(later: Any) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(later())
        tasks.create_task(asyncio.sleep(500))


@pytest.mark.parametrize("where", [itself, in_a_task, in_a_group])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Odd("mine"), "Odd: mine"),
        (Odd(), "Odd"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "SystemExit: 3"),
        (GeneratorExit("odd"), "GeneratorExit: odd"),
        (BaseExceptionGroup("two", [Odd("one")]), "Odd: one"),
    ],
)
def test_what_is_no_exception_ends_its_episode_only(where: Any, error: BaseException, words: str) -> None:
    async def raises(task: Task, agents: Agents) -> Reward:
        await agents["main"].chat([HI])
        await where(raising(error))
        return Reward(1.0)

    async def stays(task: Task, agents: Agents) -> Reward:
        await asyncio.gather(agents["main"].chat([HI]), asyncio.sleep(5.0))
        return Reward(1.0)

    async def both() -> list[Episode]:
        return await asyncio.gather(*(played(each) for each in (raises, stays)))

    failed, stayed = run_virtual(both)
    assert (failed.outcome, failed.failure, failed.score) == (Outcome.FAILED, FailureKind.WORKFLOW, None)
    if isinstance(error, BaseExceptionGroup):
        assert failed.error == words, "what it holds was never raised, and has no line"
    else:
        assert failed.error is not None and failed.error.startswith(f"{words} (test_exits.py:"), failed.error
    assert (stayed.outcome, stayed.score) == (Outcome.COMPLETED, 1.0)


@pytest.mark.parametrize("error", [Odd(), KeyboardInterrupt(), SystemExit(3)])
def test_at_its_cancellation_it_is_a_timeout_all_the_same(error: BaseException) -> None:
    async def raises(task: Task, agents: Agents) -> Reward:
        try:
            await asyncio.sleep(5000)
        finally:
            raise error

    episode = run_virtual(lambda: played(raises))
    assert (episode.failure, episode.error) == (FailureKind.TIMEOUT, "the workflow did not return within 600 s")


@pytest.mark.parametrize("error", [Odd("mine"), KeyboardInterrupt("mine"), SystemExit("mine")])
def test_of_a_grader_it_is_the_grader_s_failure(error: BaseException) -> None:
    def grades() -> float:
        raise error

    async def grades_later() -> float:
        raise error

    for grade in (grades, grades_later):

        async def workflow(task: Task, agents: Agents, grade: Any = grade) -> Reward:
            await agents["main"].chat([HI])
            return Reward(await TimeLimit(2.0).run(grade))

        episode = asyncio.run(played(workflow))  # in virtual time a thread's call is the loop's own
        assert episode.failure is FailureKind.GRADER
        assert episode.error is not None and f"raised {type(error).__name__}: mine" in episode.error


def test_a_lost_lease_still_cancels() -> None:
    async def waits(task: Task, agents: Agents) -> Reward:
        await asyncio.sleep(500)
        return Reward(1.0)

    async def main() -> None:
        playing = asyncio.ensure_future(played(waits))
        await asyncio.sleep(1.0)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    run_virtual(main)


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Mute(), "Mute (its message raised ValueError)"),
        (OSError("no file \udcff"), "OSError: no file \\udcff"),
        (ValueError("x" * 5000), "ValueError: xxx"),
    ],
)
def test_a_message_that_cannot_be_sent_does_not_end_the_worker(error: Exception, words: str) -> None:
    async def raises(task: Task, agents: Agents) -> Reward:
        raise error

    episode = run_virtual(lambda: played(raises))
    assert episode.error is not None and episode.error.startswith(words)
    assert decode(encode(episode), Episode).error == episode.error


def test_a_time_limit_of_the_workflow_s_own_is_named_and_not_that_something_was_cancelled() -> None:
    async def hurries(task: Task, agents: Agents) -> Reward:
        await asyncio.wait_for(asyncio.sleep(500), 1.0)
        return Reward(1.0)

    error = run_virtual(lambda: played(hurries)).error
    assert error is not None and error.startswith("TimeoutError (test_exits.py:")


def test_a_task_outside_of_a_workflow_may_still_end_the_process() -> None:
    async def main() -> None:
        await played(one_turn)
        await asyncio.create_task(leave_later(4))

    with pytest.raises(SystemExit) as caught:
        asyncio.run(main())
    assert caught.value.code == 4
