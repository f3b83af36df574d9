"""docs/failures.md, first table: each case is brought about where it happens, and the episode is what the row says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from astraflow.dataflow.settings import Limits
from astraflow.errors import BadRequest, EngineFailed, EnvFailed, TooLarge
from astraflow.rewards.limit import TimeLimit
from astraflow.rollout.play import WorkflowPlayer, failed
from astraflow.rollout.template import ChatTemplate
from astraflow.rollout.workflow import Agents, Reward
from astraflow.testing.virtual_loop import run_virtual
from astraflow.types import Episode, FailureKind, Outcome, Purpose, StopReason, Task
from astraflow.workflows.chat_loop import ChatLoop, Observation
from tests.unit.dataflow.rig import Rig, make_spec
from tests.unit.failures_doc import PLACES
from tests.unit.rollout.doubles import END, ScriptedEngine, lease, reply, seat
from tests.unit.rollout.test_service import ScriptedDataflow, leases, quick, service


class Odd(BaseException):
    """Neither Exception nor SystemExit."""


HI = {"role": "user", "content": "hi"}
OK = reply([5, END])
CUT = reply([5] * 8, stop=StopReason.LENGTH)


def words(episode: Episode) -> str:
    """The episode in the words of the table."""
    scored = any(turn.reward is not None for each in episode.trajectories for turn in each.turns)
    if episode.failure is not None:
        assert episode.score is None and not scored, "a failure has no reward"
        return f"failed({episode.failure})" + (", final" if episode.final else "")
    return str(episode.outcome) + ("" if scored else ", not scored")


def played(
    workflow: Any, *replies: Any, template: ChatTemplate, max_context: int = 512, turns: int = 64, **fields: Any
) -> Episode:
    async def main() -> Episode:
        engine = ScriptedEngine(*replies, max_context=max_context)
        player = WorkflowPlayer(
            workflow=workflow, seats={role: seat(engine, template) for role in ("main", "other")}, max_turns=turns
        )
        return await player(lease(time_limit_s=10.0, **fields))

    return run_virtual(main)


def talks(then: Callable[[], Awaitable[Any]]) -> Any:
    """One turn, then ``then``."""

    async def workflow(task: Task, agents: Agents) -> Any:
        await agents["main"].chat([HI])
        return await then()

    return workflow


def pays(returned: Any) -> Any:
    async def then() -> Any:
        return returned

    return talks(then)


def raises(error: BaseException) -> Any:
    async def then() -> Any:
        raise error

    return talks(then)


async def again_and_again(task: Task, agents: Agents) -> Reward:
    for _ in range(3):
        await agents["main"].chat([HI])
    return Reward(1.0)


async def wraps(task: Task, agents: Agents) -> Reward:
    try:
        await agents["main"].chat([HI])
    except EngineFailed as caught:
        raise RuntimeError("my framework gave up") from caught
    return Reward(1.0)


async def hangs() -> Reward:
    await asyncio.Event().wait()
    return Reward(1.0)


async def returns_late() -> Reward:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return Reward(1.0)
    raise AssertionError


async def stubborn() -> Reward:
    until = asyncio.get_running_loop().time() + 100
    while (left := until - asyncio.get_running_loop().time()) > 0:
        try:
            await asyncio.sleep(left)
        except asyncio.CancelledError:
            continue
    return Reward(1.0)


async def pays_nobody_s_role(task: Task, agents: Agents) -> Reward:
    await agents["main"].chat([HI])
    return Reward(1.0, verifyer=1.0)


class Broken:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def reset(self) -> str:
        return "go"

    async def step(self, action: str) -> Observation:
        raise self.error

    async def close(self) -> None: ...


def breaks(error: BaseException) -> ChatLoop:
    async def broken(task: Task) -> Broken:
        return Broken(error)

    return ChatLoop(broken)


def graded_by(grade: Callable[..., Any]) -> Any:
    async def then() -> Reward:
        return Reward(await TimeLimit(2.0).run(grade))

    return talks(then)


def bad_grade() -> float:
    raise ZeroDivisionError("no verdict")


async def slow_grade() -> float:
    await asyncio.sleep(3)
    return 1.0


PLAYED: dict[str, Callable[[ChatTemplate], list[Episode]]] = {
    "engine_unreachable": lambda t: [
        played(pays(Reward(1.0)), error, template=t)
        for error in (OSError("gone"), TimeoutError("no answer"), BadRequest("?"), ValueError("a bug of ours"))
    ],
    "engine_cancels": lambda t: [played(pays(Reward(1.0)), reply([5], stop=StopReason.CANCELLED), template=t)],
    "engine_error_wrapped": lambda t: [played(wraps, ConnectionError("reset"), template=t)],
    "version_not_held": lambda t: [
        played(pays(Reward(1.0)), OK, template=t, versions={"main": 1}, purpose=Purpose.EVAL)
    ],
    "prompt_too_long": lambda t: [played(pays(Reward(1.0)), OK, template=t, max_context=4)],
    "reply_cut": lambda t: [played(pays(Reward(0.5)), CUT, template=t)],
    "reply_cut_ungraded": lambda t: [played(again_and_again, CUT, OK, OK, template=t)],
    "turn_limit": lambda t: [played(again_and_again, OK, OK, OK, template=t, turns=2)],
    "environment_raises": lambda t: [
        played(raises(EnvFailed("no browser")), OK, template=t),
        *(played(breaks(error), OK, template=t) for error in (KeyError("no browser"), KeyboardInterrupt(), Odd())),
    ],
    "grader_raises": lambda t: [played(graded_by(bad_grade), OK, template=t)],
    "grader_hangs": lambda t: [played(graded_by(slow_grade), OK, template=t)],
    "reward_nan": lambda t: [played(pays(Reward(float("nan"))), OK, template=t)],
    "reward_infinite": lambda t: [
        played(pays(Reward(x)), OK, template=t) for x in (float("inf"), -float("inf"), 10**400, 1e300)
    ],
    "reward_no_number": lambda t: [played(pays(Reward(x)), OK, template=t) for x in ("1.0", [1.0], np.array([1.0]))],  # type: ignore[arg-type]
    "reward_missing": lambda t: [played(pays(x), OK, template=t) for x in (Reward(), Reward(other=1.0))],
    "no_reward_object": lambda t: [played(pays(x), OK, template=t) for x in (None, 1.0, {"main": 1.0})],
    "reward_none": lambda t: [played(pays(x), OK, template=t) for x in (Reward(main=None), Reward(None))],
    "workflow_raises": lambda t: [
        played(raises(error), OK, template=t) for error in (KeyError("mine"), KeyboardInterrupt(), SystemExit(3), Odd())
    ],
    "unsendable_reward": lambda t: [
        played(pays(x), OK, template=t)
        for x in (
            Reward(1.0, baseline_keys={0: 5}),  # type: ignore[dict-item]
            Reward(1.0, features={5: 1.0}),  # type: ignore[dict-item]
            Reward(1.0, features={"x": 10**400}),
        )
    ],
    "workflow_timeout_error": lambda t: [played(raises(TimeoutError("their own")), OK, template=t)],
    "workflow_cancels_itself": lambda t: [played(raises(asyncio.CancelledError()), OK, template=t)],
    "unknown_role": lambda t: [played(pays_nobody_s_role, OK, template=t)],
    "workflow_hangs": lambda t: [played(talks(hangs), OK, template=t)],
    "late_return": lambda t: [played(talks(returns_late), OK, template=t)],
    "ignores_cancellation": lambda t: [played(talks(stubborn), OK, template=t)],
}


@pytest.mark.parametrize("case", PLAYED)
def test_f13_the_place_decides_the_kind(smollm2: ChatTemplate, case: str) -> None:
    for episode in PLAYED[case](smollm2):
        assert words(episode) == PLACES[case]["the episode is"], episode.error


# ── what a worker does to its leases ──


def failures(rig: Rig) -> list[str]:
    return [f"failed({kind})" for kind in FailureKind for _ in range(int(rig.db.counter(f"failed/{kind}")))]


def worker_dies() -> list[str]:
    with Rig() as rig:
        rig.leases(1)
        rig.advance(11)
        return failures(rig)


def over_the_limit() -> list[str]:
    with Rig(make_spec(limits=Limits(time_limit_s=20.0, grace_s=5.0))) as rig:
        held = rig.leases(1)
        for _ in range(5):
            assert not failures(rig)
            rig.advance(5)
            rig.renew(held)
        return failures(rig)


def handed_back() -> list[str]:
    from astraflow.wire.messages import HandBackRequest

    with Rig() as rig:
        (held,) = rig.leases(1)
        rig.go(rig.flow.hand_back(HandBackRequest(worker="w", held=(held.id,))))
        assert rig.leases(1)[0].attempt == 2
        return failures(rig) or ["no failure"]


def refused_with(error: Exception) -> list[str]:
    """What the worker submits after dataflow refused a good episode."""

    async def main() -> ScriptedDataflow:
        dataflow = ScriptedDataflow(*leases(1), finish=False)
        dataflow.errors["submit"] = [error]
        worker = service(dataflow, quick)
        task = asyncio.ensure_future(worker.run())
        await asyncio.sleep(5)
        worker.stop()
        await task
        return dataflow

    return [words(episode) for episode in run_virtual(main).submitted.values()]


DONE_BY_WORKERS: dict[str, Callable[[], list[str]]] = {
    "worker_dies": worker_dies,
    "over_the_limit": over_the_limit,
    "handed_back": handed_back,
    "refused_by_dataflow": lambda: refused_with(BadRequest("spans of no published weights")),
    "too_large": lambda: refused_with(TooLarge("over the limit")),
}


@pytest.mark.parametrize("case", DONE_BY_WORKERS)
def test_f13_a_worker_s_failure_is_its_own(case: str) -> None:
    assert DONE_BY_WORKERS[case]() == [PLACES[case]["the episode is"]]


def test_every_case_of_the_page_is_brought_about() -> None:
    assert set(PLAYED) | set(DONE_BY_WORKERS) == set(PLACES)


def test_a_timeout_is_never_a_normal_end() -> None:
    """Whatever the words of the row, no hang, limit or lost worker is an end that may be credited."""
    slow = ("grader_hangs", "workflow_hangs", "late_return", "ignores_cancellation", "worker_dies", "over_the_limit")
    assert all(PLACES[case]["the episode is"].startswith("failed(") for case in slow)
    record = failed(lease(), FailureKind.TIMEOUT, "over")
    assert (record.outcome, record.score, record.trajectories) == (Outcome.FAILED, None, ())
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"task_key": "t", "outcome": "completed", "failure": "timeout"}, Episode)
