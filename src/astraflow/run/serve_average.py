"""The process of a policy that is a moving average: its loop, with a store and a folder of its own."""

from __future__ import annotations

import asyncio
import logging
import signal
import tempfile
from pathlib import Path

from astraflow.clock import SystemClock
from astraflow.run.config import Resolved
from astraflow.trainer.average import AverageLoop
from astraflow.trainer.loop import TrainerIdentity
from astraflow.trainer.scratch import Scratch
from astraflow.weights.cache import Cache
from astraflow.weights.publish import Publisher
from astraflow.weights.store import WeightStore
from astraflow.wire.goodbye import TOLD
from astraflow.wire.messages import AddedPolicy
from astraflow.wire.protocol import Dataflow

log = logging.getLogger("astraflow.trainer")


def build_average(
    resolved: Resolved, dataflow: Dataflow, place: AddedPolicy, *, store: WeightStore, folder: Path, cache: Path
) -> AverageLoop:
    """``folder``: of the average between two lives; ``cache``: for this life."""
    folder.mkdir(parents=True, exist_ok=True)
    Scratch(folder).clear()  # of a life that was killed
    return AverageLoop(
        identity=TrainerIdentity(
            policy=place.name,
            name=place.name,
            config_digest=resolved.digest,
            code_digest=resolved.code_digest,
            config=resolved.settings(),
        ),
        source=place.average_of,
        decay=place.decay,
        dataflow=dataflow,
        publisher=Publisher(store, place.name),
        cache=Cache(store, cache),
        folder=folder,
        clock=SystemClock(),
        say=lambda line: log.info("%s", line),
    )


async def serve_average(
    resolved: Resolved, dataflow: Dataflow, place: AddedPolicy, *, store: WeightStore, folder: Path
) -> None:
    """Until the run is finished, or SIGTERM."""
    with tempfile.TemporaryDirectory(prefix="average-cache-") as cache:
        loop = build_average(resolved, dataflow, place, store=store, folder=folder, cache=Path(cache))
        work = asyncio.ensure_future(loop.run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, work.cancel)
        try:
            await work
        except asyncio.CancelledError:
            log.info("stopped policy=%s", place.name)
            await loop.say_goodbye(TOLD)
