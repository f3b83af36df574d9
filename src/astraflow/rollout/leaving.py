"""Why a worker ends on purpose, and its last words: dataflow then need not wait until it is dead."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from astraflow.errors import AstraFlowError
from astraflow.wire.messages import ComponentReport, ReportRequest
from astraflow.wire.protocol import Dataflow

log = logging.getLogger("astraflow.rollout")

TOLD = "it was told to stop"
DRAINED = "dataflow told it to leave"
ENDED = "the run has ended"
GOODBYE_S = 5.0
LEFT = "left"


async def say_goodbye(dataflow: Dataflow, name: str, incarnation: str, report: ComponentReport, why: str) -> None:
    """Best effort: a worker whom nobody hears is declared dead a little later."""
    last = msgspec.structs.replace(report, doing=LEFT, since_s=0.0, why=why, pulling={}, endpoint="", relay="")
    request = ReportRequest(component="rollout", name=name, incarnation=incarnation, report=last, leaving=True)
    try:
        async with asyncio.timeout(GOODBYE_S):
            await dataflow.report(request)
    except (AstraFlowError, TimeoutError) as error:
        log.info("goodbye_not_heard worker=%s error=%s", name, error)
