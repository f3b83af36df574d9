"""Why a component ends on purpose, and its last words: dataflow then need not wait until it is dead."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from astraflow.errors import AstraFlowError
from astraflow.wire.messages import ComponentReport, ReportRequest
from astraflow.wire.protocol import Dataflow

log = logging.getLogger("astraflow.wire")

TOLD = "it was told to stop"
DRAINED = "dataflow told it to leave"
ENDED = "the run has ended"
TRAINED = "its policy has all its steps"
GOODBYE_S = 5.0
LEFT = "left"


async def say_goodbye(
    dataflow: Dataflow, component: str, name: str, incarnation: str, report: ComponentReport, *, why: str
) -> None:
    """Best effort: one whom nobody hears is declared dead a little later."""
    last = msgspec.structs.replace(report, doing=LEFT, since_s=0.0, why=why, pulling={}, endpoint="", relay="")
    request = ReportRequest(component=component, name=name, incarnation=incarnation, report=last, leaving=True)
    try:
        async with asyncio.timeout(GOODBYE_S):
            await dataflow.report(request)
    except (AstraFlowError, TimeoutError) as error:
        log.info("goodbye_not_heard component=%s name=%s error=%r", component, name, error)
