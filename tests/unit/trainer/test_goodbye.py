"""A trainer that ends on purpose says so, and why; one that dies of something does not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from astraflow.errors import AstraFlowError, Unauthorised, Unavailable
from astraflow.wire import messages as m
from astraflow.wire.goodbye import TOLD, TRAINED
from tests.unit.trainer.scripted import CountingBackend, ScriptedDataflow
from tests.unit.trainer.test_loop import make


class Deaf(ScriptedDataflow):
    """Does not hear last words."""

    def __init__(self, error: AstraFlowError) -> None:
        super().__init__(steps=2)
        self.error = error

    async def report(self, request: m.ReportRequest) -> m.Done:
        if request.leaving:
            raise self.error
        return await super().report(request)


class Quiet(ScriptedDataflow):
    """Never has a batch."""

    def __init__(self) -> None:
        super().__init__(steps=3)
        self.asked = asyncio.Event()

    async def batch(self, request: m.BatchRequest) -> m.BatchReply:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


def test_after_its_last_step_and_its_last_checkpoint(tmp_path: Path) -> None:
    dataflow = ScriptedDataflow(steps=3)
    loop = make(dataflow, tmp_path, every=2)
    asyncio.run(loop.run())
    (last,) = dataflow.last_words
    assert (last.component, last.name, last.leaving) == ("trainer", "t", True)
    assert last.incarnation == dataflow.hellos[0].incarnation
    assert (last.report.doing, last.report.why, last.report.versions) == ("left", TRAINED, {"p": 3})
    assert (tmp_path / "step-00000003").is_dir()


def test_told_to_stop_while_it_waits_for_a_batch(tmp_path: Path) -> None:
    """What the process does on SIGTERM: the loop is cancelled, then it says goodbye."""

    async def main() -> ScriptedDataflow:
        dataflow = Quiet()
        loop = make(dataflow, tmp_path)
        work = asyncio.ensure_future(loop.run())
        async with asyncio.timeout(10):
            await dataflow.asked.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert not dataflow.last_words
        await loop.say_goodbye(TOLD)
        return dataflow

    (last,) = asyncio.run(main()).last_words
    assert last.report.why == TOLD


@pytest.mark.parametrize("error", [Unavailable("gone"), Unauthorised("the token was withdrawn")])
def test_a_dataflow_that_does_not_hear_it_changes_nothing(tmp_path: Path, error: AstraFlowError) -> None:
    dataflow = Deaf(error)
    asyncio.run(make(dataflow, tmp_path).run())
    assert len(dataflow.committed) == 2 and not dataflow.last_words


def test_one_that_dies_of_something_says_no_goodbye(tmp_path: Path) -> None:
    class Poisoned(CountingBackend):
        def step(self, batch: Any) -> Any:
            raise ValueError("boom")

    dataflow = ScriptedDataflow(steps=3)
    with pytest.raises(ValueError, match="boom"):
        asyncio.run(make(dataflow, tmp_path, backend=Poisoned()).run())
    assert dataflow.failures and not dataflow.last_words
