"""Graders with a deadline, in any thread."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from astraflow.errors import GraderFailed
from astraflow.rewards.answer import judge
from astraflow.rewards.limit import TimeLimit
from astraflow.testing.check_reward import check_reward, check_time_limit
from astraflow.types import Task

TASK = Task(key="t", payload={"answer": "5"})


def score(text: str) -> float:
    return judge(text, "5").score


def test_f9_the_same_in_the_main_thread_in_another_and_in_an_executor() -> None:
    async def graded() -> float:
        return await TimeLimit(5.0).run(score, r"\boxed{5}")

    found = [asyncio.run(graded())]
    thread = threading.Thread(target=lambda: found.append(asyncio.run(graded())))
    thread.start()
    thread.join()

    async def in_executor() -> None:
        found.append(await asyncio.to_thread(lambda: asyncio.run(graded())))

    asyncio.run(in_executor())
    assert found == [1.0, 1.0, 1.0]


def test_f9_an_exception_is_no_zero() -> None:
    def broken(text: str) -> float:
        raise ValueError("signal only works in main thread")

    with pytest.raises(GraderFailed, match=r"broken raised ValueError: signal only"):
        asyncio.run(TimeLimit(5.0).run(broken, ""))


def test_f9_a_grader_that_hangs_fails_in_time_and_leaves_the_loop_alive() -> None:
    release = threading.Event()
    beats = 0

    async def main() -> float:
        nonlocal beats
        limit = TimeLimit(0.2)
        hangs = asyncio.ensure_future(limit.run(release.wait))
        began = time.monotonic()
        while not hangs.done():
            await asyncio.sleep(0.01)
            beats += 1
        with pytest.raises(GraderFailed, match=r"longer than 0\.2 s"):
            await hangs
        return time.monotonic() - began

    took = asyncio.run(main())
    release.set()
    assert took < 2.0 and beats >= 3


def test_graders_that_hang_do_not_pile_up() -> None:
    release = threading.Event()

    async def main() -> str:
        limit = TimeLimit(0.05, most_running=2)
        for _ in range(2):
            with pytest.raises(GraderFailed, match="longer"):
                await limit.run(release.wait)
        with pytest.raises(GraderFailed) as found:
            await limit.run(score, "")
        return str(found.value)

    said = asyncio.run(main())
    release.set()
    assert said == "2 graders are still running: do they hang?"


def test_a_coroutine_function_is_awaited() -> None:
    async def grade(text: str) -> float:
        await asyncio.sleep(0)
        return 0.5

    class Judge:
        async def __call__(self, text: str) -> float:
            return 0.25

    assert asyncio.run(TimeLimit(1.0).run(grade, "")) == 0.5
    assert asyncio.run(TimeLimit(1.0).run(Judge(), "")) == 0.25


def test_the_kit_catches_bad_rewards() -> None:
    with pytest.raises(AssertionError, match="must score"):
        check_reward(lambda text, task: 1.0, TASK, right=["5"])
    with pytest.raises(AssertionError, match="finite"):
        check_reward(lambda text, task: float("nan"), TASK, right=["5"])
    with pytest.raises(AssertionError, match="at least one reply"):
        check_reward(lambda text, task: 0.0, TASK, right=[])
    with pytest.raises(AssertionError, match="must fail, got"):
        check_time_limit(lambda text, task: 0.0, TASK, "5")


def test_the_kit_accepts_a_grader_that_fails_in_time() -> None:
    release = threading.Event()
    check_time_limit(lambda text, task: float(release.wait()), TASK, "5", limit_s=0.05)
    release.set()
