"""Conformance kit of rewards: ``check_reward(Answer(), right=..., wrong=..., task=task)`` in a test of yours."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from astraflow.errors import GraderFailed
from astraflow.rewards.limit import TimeLimit
from astraflow.types import Task

GARBAGE = ("", " ", "\n", "\\boxed{", "<answer>", "\x00", "a" * 10_000, "{" * 10_000, "</think>" * 1_000, "é漢🙂�")


def check_reward(
    grade: Callable[..., Any],
    task: Task,
    *,
    right: Sequence[str],
    wrong: Sequence[str] = (),
    garbage: Sequence[str] = GARBAGE,
    limit_s: float = 10.0,
) -> None:
    """``right`` replies score 1, ``wrong`` ones and garbage 0, the same in every thread and at every call.

    Raises AssertionError saying which reply got what.
    """
    assert right, "name at least one reply that is right: a reward that never pays teaches nothing"
    for reply, expected in [*((r, 1.0) for r in right), *((w, 0.0) for w in (*wrong, *garbage))]:
        first = asyncio.run(_grade(grade, reply, task, limit_s))
        shown = reply if len(reply) <= 60 else reply[:57] + "..."
        assert first == expected, f"reply {shown!r} must score {expected}, got {first!r}"
        assert _in_a_thread(grade, reply, task, limit_s) == first, f"reply {shown!r} scores otherwise in a thread"


def check_time_limit(grade: Callable[..., Any], task: Task, reply: str, *, limit_s: float = 0.2) -> None:
    """A grader that hangs on ``reply`` is a failure of the grader, never a zero."""
    try:
        score = asyncio.run(_grade(grade, reply, task, limit_s))
    except GraderFailed:
        return
    raise AssertionError(f"a grader that takes longer than {limit_s:g} s must fail, got {score!r}")


async def _grade(grade: Callable[..., Any], reply: str, task: Task, limit_s: float) -> float:
    value = await TimeLimit(limit_s).run(grade, reply, task)
    assert isinstance(value, int | float) and math.isfinite(value), f"a reward is a finite number, got {value!r}"
    return float(value)


def _in_a_thread(grade: Callable[..., Any], reply: str, task: Task, limit_s: float) -> float | None:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(_grade(grade, reply, task, limit_s))))
    thread.start()
    thread.join(2 * limit_s)
    return found[0] if found else None
