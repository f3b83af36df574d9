"""A worker that ends on purpose says so, and why, once it holds nothing; one that dies of something does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from astraflow.errors import AstraFlowError, Unauthorised, Unavailable
from astraflow.rollout.service import RolloutService
from astraflow.testing.virtual_loop import run_virtual
from astraflow.wire.goodbye import DRAINED, ENDED, TOLD
from tests.unit.rollout.test_service import ScriptedDataflow, hang, leases, quick, service


def ended(do: Callable[[ScriptedDataflow, RolloutService], None], *, finish: bool = False) -> ScriptedDataflow:
    async def main() -> ScriptedDataflow:
        dataflow = ScriptedDataflow(*leases(2), finish=finish)
        worker = service(dataflow, quick if finish else hang, drain_grace_s=1.0)
        task = asyncio.ensure_future(worker.run())
        await asyncio.sleep(5)
        do(dataflow, worker)
        await task
        assert len(asyncio.all_tasks()) == 1
        return dataflow

    return run_virtual(main)


def drain(dataflow: ScriptedDataflow, worker: RolloutService) -> None:
    dataflow.drain = True


@pytest.mark.parametrize(("do", "why"), [(lambda _, worker: worker.stop(), TOLD), (drain, DRAINED)])
def test_who_is_told_to_leave_says_goodbye_after_handing_back(
    do: Callable[[ScriptedDataflow, RolloutService], None], why: str
) -> None:
    dataflow = ended(do)
    (last,) = dataflow.last_words
    assert (last.component, last.name, last.incarnation, last.leaving) == ("rollout", "w", "w#1", True)
    assert (last.report.doing, last.report.why, last.report.endpoint) == ("left", why, "")
    assert last.report.metrics["lease/handed_back"] == 2.0 == len(dataflow.handed_back)


def test_at_the_end_of_the_run_it_says_that() -> None:
    (last,) = ended(lambda *_: None, finish=True).last_words
    assert last.leaving and last.report.why == ENDED
    assert last.report.metrics["episode/completed"] == 2.0


def test_the_first_reason_counts() -> None:
    def both(dataflow: ScriptedDataflow, worker: RolloutService) -> None:
        worker.stop()
        dataflow.drain = True

    (last,) = ended(both).last_words
    assert last.report.why == TOLD


@pytest.mark.parametrize("error", [Unavailable("gone"), Unauthorised("the token was withdrawn")])
def test_a_dataflow_that_does_not_hear_it_changes_nothing(error: AstraFlowError) -> None:
    def unheard(dataflow: ScriptedDataflow, worker: RolloutService) -> None:
        dataflow.errors["report"] = [error]
        worker.stop()

    dataflow = ended(unheard)
    assert not dataflow.last_words and len(dataflow.handed_back) == 2


def test_one_that_dies_of_something_says_no_goodbye() -> None:
    async def main() -> ScriptedDataflow:
        dataflow = ScriptedDataflow(*leases(2), finish=False)
        task = asyncio.ensure_future(service(dataflow, hang).run())
        await asyncio.sleep(3)
        dataflow.errors["renew"] = [Unauthorised("the token was withdrawn")]
        with pytest.raises(Unauthorised):
            await task
        return dataflow

    assert not run_virtual(main).last_words
