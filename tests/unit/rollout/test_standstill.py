"""A loop that does not come round: noticed from a thread, named, and in the end given up. Real threads, short ticks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from astraflow.errors import Unavailable
from astraflow.rollout.loop_guard import PLAYING, LoopGuard, Standstill
from astraflow.rollout.standstill import StandstillWorker
from astraflow.types import FailureKind, Lease
from astraflow.wire import messages as m
from tests.unit.rollout.doubles import lease
from tests.unit.rollout.test_service import ScriptedDataflow

TICK_S = 0.01


def seen_while(block: Callable[[], Any], *, enough: int = 3) -> list[Standstill]:
    """What the guard tells while ``block`` runs in the loop."""
    seen: list[Standstill] = []
    full = threading.Event()

    def told(still: Standstill) -> None:
        seen.append(still)
        if len(seen) >= enough:
            full.set()

    async def main() -> None:
        with LoopGuard(told, blocked_after_s=3 * TICK_S, tick_s=TICK_S).watching():
            await block_in_a_task()

    async def block_in_a_task() -> None:
        async def playing() -> None:
            PLAYING.set("3/1/2")
            await asyncio.create_task(inner())

        async def inner() -> None:
            block()
            assert full.wait(10), "the guard saw nothing"

        await asyncio.create_task(playing())

    asyncio.run(main())
    return seen


def test_a_blocked_loop_is_noticed_with_its_place_and_its_lease() -> None:
    """The lease is known in tasks that the workflow made, the place is the workflow's own line."""
    seen = seen_while(lambda: time.sleep(6 * TICK_S), enough=1)
    assert seen[0].seconds == pytest.approx(3 * TICK_S)
    assert seen[0].lease == "3/1/2"
    assert seen[0].place.startswith("test_standstill.py:") and seen[0].place.endswith((" in <lambda>", " in inner"))


def test_it_is_told_every_tick_and_the_seconds_grow() -> None:
    seen = seen_while(lambda: None, enough=4)
    assert [still.seconds for still in seen[:4]] == pytest.approx([3 * TICK_S, 4 * TICK_S, 5 * TICK_S, 6 * TICK_S])


def test_a_loop_that_comes_round_is_left_alone() -> None:
    seen: list[Standstill] = []

    async def main() -> None:
        with LoopGuard(seen.append, blocked_after_s=1.0, tick_s=TICK_S).watching():
            for _ in range(30):
                await asyncio.sleep(TICK_S)

    asyncio.run(main())
    assert seen == []


def test_a_guard_survives_what_it_cannot_say() -> None:
    calls: list[float] = []
    enough = threading.Event()

    def told(still: Standstill) -> None:
        calls.append(still.seconds)
        if len(calls) == 3:
            enough.set()
        raise Unavailable("dataflow is away")

    async def main() -> None:
        with LoopGuard(told, blocked_after_s=TICK_S, tick_s=TICK_S).watching():
            assert enough.wait(10)

    asyncio.run(main())
    assert len(calls) >= 3


class Worker:
    name, incarnation, heartbeat_s = "w", "i", 2.0

    def __init__(self, *leases: Lease) -> None:
        self.playing = {each.id: each for each in leases}


def teller(
    dataflow: ScriptedDataflow, *leases: Lease, block_limit_s: float = 30.0
) -> tuple[StandstillWorker, list[str]]:
    ended: list[str] = []

    @asynccontextmanager
    async def connect() -> AsyncIterator[Any]:
        yield dataflow

    return StandstillWorker(Worker(*leases), connect, ended.append, block_limit_s=block_limit_s), ended


def still(seconds: float, *, lease_id: str | None) -> Standstill:
    return Standstill(seconds=seconds, place="solve.py:7 in solve", lease=lease_id)


def test_while_it_lasts_leases_are_renewed_and_dataflow_hears_who_blocks() -> None:
    culprit, other = lease(index=0), lease(index=1)
    dataflow = ScriptedDataflow(culprit, other)
    told, ended = teller(dataflow, culprit, other)
    for seconds in (2.0, 2.5, 3.0, 4.0, 4.5):
        told(still(seconds, lease_id=culprit.id))
    assert [beat.held for beat in dataflow.beats] == [(culprit.id, other.id)] * 2
    report = dataflow.beats[-1].report
    assert (report.doing, report.since_s) == ("blocked", 4.0)
    assert report.why == f"the workflow of episode {culprit.id} does not return at solve.py:7 in solve"
    told(still(2.0, lease_id=culprit.id))  # the next time
    assert len(dataflow.beats) == 3 and not ended and not dataflow.submitted


@pytest.mark.parametrize(("time_limit_s", "block_limit_s", "limit"), [(600.0, 30.0, 30.0), (12.0, 30.0, 12.0)])
def test_at_the_limit_the_culprit_is_failed_by_name_and_the_others_are_handed_back(
    time_limit_s: float, block_limit_s: float, limit: float
) -> None:
    culprit, other = lease(index=0, time_limit_s=time_limit_s), lease(index=1)
    dataflow = ScriptedDataflow(culprit, other)
    told, ended = teller(dataflow, culprit, other, block_limit_s=block_limit_s)
    told(still(limit - 0.5, lease_id=culprit.id))
    assert not ended
    told(still(limit, lease_id=culprit.id))
    episode = dataflow.submitted[culprit.id]
    assert episode.failure is FailureKind.TIMEOUT
    assert (
        episode.error
        == f"the workflow of episode {culprit.id} blocked the event loop for {limit:g} s at solve.py:7 in solve"
    )
    assert dataflow.handed_back == [other.id]
    assert ended == [f"{episode.error}; await there, or use asyncio.to_thread"]


def test_the_process_ends_although_nobody_can_be_told() -> None:
    culprit = lease()
    dataflow = ScriptedDataflow(culprit)
    dataflow.errors["submit"] = [Unavailable("away")]
    told, ended = teller(dataflow, culprit)
    told(still(30.0, lease_id=culprit.id))
    assert len(ended) == 1 and not dataflow.submitted


def test_what_is_no_workflow_is_named_but_never_ended_and_its_leases_run_out() -> None:
    held = lease()
    dataflow = ScriptedDataflow(held)
    told, ended = teller(dataflow, held)
    told(still(300.0, lease_id=None))
    assert not ended and not dataflow.submitted
    assert dataflow.beats[0].held == ()
    assert dataflow.beats[0].report.why == "something that is no workflow does not return at solve.py:7 in solve"
    assert isinstance(dataflow.beats[0], m.RenewRequest)
