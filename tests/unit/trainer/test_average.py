"""The loop of a moving average beside a dataflow that cannot always answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from astraflow.clock import SystemClock
from astraflow.errors import AstraFlowError, Fenced, StorageFull, Unavailable
from astraflow.trainer.average import AverageLoop
from astraflow.trainer.loop import TrainerIdentity


class Deaf:
    """Of a dataflow, the one call that a heartbeat is."""

    def __init__(self, error: AstraFlowError) -> None:
        self.error = error
        self.asked = 0

    async def report(self, request: Any) -> None:
        self.asked += 1
        raise self.error


def beat(error: AstraFlowError, folder: Path) -> Deaf:
    deaf: Any = Deaf(error)
    nothing: Any = None
    loop = AverageLoop(
        identity=TrainerIdentity(policy="p", name="t-p"),
        source="q",
        decay=0.9,
        dataflow=deaf,
        publisher=nothing,
        cache=nothing,
        folder=folder,
        clock=SystemClock(),
    )
    asyncio.run(loop._beat())
    found: Deaf = deaf
    return found


@pytest.mark.parametrize("error", [Unavailable("it restarts"), StorageFull("no space")])
def test_a_heartbeat_that_nobody_hears_does_not_end_the_average(error: AstraFlowError, tmp_path: Path) -> None:
    assert beat(error, tmp_path).asked == 1


def test_one_that_is_refused_does(tmp_path: Path) -> None:
    with pytest.raises(Fenced):
        beat(Fenced("another has the name"), tmp_path)
