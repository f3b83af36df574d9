"""The loop that owns time: it must be exact, seeded, and loud when nothing can happen any more."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from astraflow.testing.virtual_clock import ManualClock, VirtualClock
from astraflow.testing.virtual_loop import Deadlock, OutOfTime, run_virtual


def test_an_hour_takes_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(3000)
        return asyncio.get_running_loop().time()

    began = time.monotonic()
    assert run_virtual(main) == 3000
    assert time.monotonic() - began < 1


def test_timers_fire_in_order_of_time() -> None:
    async def main() -> list[float]:
        seen: list[float] = []

        async def wait(seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append(seconds)

        await asyncio.gather(*(wait(s) for s in (3.0, 1.0, 2.0, 0.5)))
        return seen

    for seed in range(5):
        assert run_virtual(main, seed=seed) == [0.5, 1.0, 2.0, 3.0]


async def _race() -> str:
    seen: list[str] = []

    async def step(name: str) -> None:
        for _ in range(3):
            seen.append(name)
            await asyncio.sleep(0)

    await asyncio.gather(*(step(n) for n in "abc"))
    return "".join(seen)


def test_one_seed_is_one_order_and_seeds_differ() -> None:
    first = [run_virtual(_race, seed=s) for s in range(10)]
    again = [run_virtual(_race, seed=s) for s in range(10)]
    assert first == again
    assert len(set(first)) > 3
    assert run_virtual(_race) == "abcabcabc"


def test_a_deadlock_names_who_hangs_and_where() -> None:
    async def waits_for_ever() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(waits_for_ever(), name="the-forgotten-one")
        await task

    with pytest.raises(Deadlock, match=r"the-forgotten-one at .*wait"):
        run_virtual(main)


def test_the_limit_names_who_still_runs() -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110 - what a bad loop looks like
            await asyncio.sleep(1)

    with pytest.raises(OutOfTime, match=r"10 virtual seconds; pending: .*sleep"):
        run_virtual(main, limit_s=10)


def test_time_that_stands_still_is_an_error() -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110 - what a bad loop looks like
            await asyncio.sleep(0)

    with pytest.raises(Deadlock, match="without a step of time"):
        run_virtual(main)


def test_threads_run_on_the_loop_and_take_virtual_time() -> None:
    async def main() -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        value = await asyncio.to_thread(lambda: 41 + 1)
        return value, loop.time()

    value, took = run_virtual(main, seed=3, thread_s=(0.5, 1.5))
    assert value == 42
    assert 0.5 <= took <= 1.5


def test_an_executor_of_somebodys_own_has_a_speed_of_its_own() -> None:
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as disk:
            await loop.run_in_executor(disk, int)
            written = loop.time()
            await asyncio.to_thread(int)
        return written, loop.time() - written

    assert run_virtual(main, seed=3, thread_s=(2.0, 2.0), executor_s=(0.25, 0.25)) == (0.25, 2.0)


def test_an_error_of_a_thread_reaches_its_caller() -> None:
    async def main() -> None:
        await asyncio.to_thread(int, "x")

    with pytest.raises(ValueError, match="invalid literal"):
        run_virtual(main)


def test_a_cancelled_thread_call_never_runs() -> None:
    """A process that dies has not done what it was about to do."""
    ran: list[int] = []

    async def main() -> None:
        task = asyncio.create_task(asyncio.to_thread(ran.append, 1))
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.sleep(5)

    run_virtual(main, seed=1, thread_s=(1.0, 1.0))
    assert ran == []


def test_an_error_that_nobody_awaited_fails_the_run() -> None:
    async def broken() -> None:
        raise RuntimeError("lost in a background task")

    async def main() -> None:
        task = asyncio.create_task(broken())
        await asyncio.sleep(1)
        assert task.done()
        del task
        await asyncio.sleep(1)

    with pytest.raises(RuntimeError, match="lost in a background task"):
        run_virtual(main)


def test_timeouts_work_in_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main) == 7


def test_clocks_start_anew_and_wall_time_may_lie() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(5)
        clock = VirtualClock(loop, wall=100.0)
        await asyncio.sleep(2)
        assert clock.monotonic() == 2
        assert clock.wall() == 107
        clock.jump_wall(-50)
        assert clock.wall() == 57
        assert clock.monotonic() == 2

    run_virtual(main)


def test_manual_clock_refuses_to_go_back() -> None:
    clock = ManualClock(10.0)
    assert clock.advance(2.5) == 12.5
    with pytest.raises(ValueError, match="never goes back"):
        clock.advance(-1)
