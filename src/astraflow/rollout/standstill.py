"""What a worker does whose event loop stands still: the guard's thread speaks for it.

A workflow that blocks (``time.sleep``, a loop without await) stops every episode of its worker, and the heartbeat. For
``block_limit_s`` the thread keeps the leases alive and tells dataflow who blocks and where. Then, or at the episode's
own time limit, it ends that episode as failed(timeout), hands the others back and ends the process: nothing else can
be done about a loop that does not come round. What blocks and is no workflow is named, and the leases run out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from astraflow.errors import AstraFlowError
from astraflow.rollout.loop_guard import Standstill
from astraflow.rollout.play import failed
from astraflow.types import FailureKind, Lease
from astraflow.wire import messages as m
from astraflow.wire.protocol import Dataflow

log = logging.getLogger("astraflow.rollout")

SPEAK_S = 10.0
"""How long one word to dataflow may take."""
BLOCKED = "blocked"


class Worker(Protocol):
    """What ``RolloutService`` shows of itself."""

    name: str
    incarnation: str
    heartbeat_s: float

    @property
    def playing(self) -> Mapping[str, Lease]:
        """By lease id."""


class StandstillWorker:
    """Called by the guard's thread. ``connect``: a connection of its own; ``end``: ends the process."""

    def __init__(
        self,
        worker: Worker,
        connect: Callable[[], AbstractAsyncContextManager[Dataflow]],
        end: Callable[[str], None],
        *,
        block_limit_s: float,
    ) -> None:
        self._worker = worker
        self._connect = connect
        self._end = end
        self._limit_s = block_limit_s
        self._spoke_at_s = 0.0

    def __call__(self, still: Standstill) -> None:
        playing = dict(self._worker.playing)
        lease = playing.get(still.lease or "")
        if lease is not None and still.seconds >= min(self._limit_s, lease.time_limit_s):
            message = f"{_who(lease)} blocked the event loop for {still.seconds:g} s at {still.place}"
            try:
                asyncio.run(self._give_up(lease, playing, message))
            except (AstraFlowError, TimeoutError) as error:  # the leases then run out by themselves
                log.warning("standstill_not_told error=%s", error)
            self._end(f"{message}; await there, or use asyncio.to_thread")
        elif still.seconds < self._spoke_at_s or still.seconds >= self._spoke_at_s + self._worker.heartbeat_s:
            self._spoke_at_s = still.seconds
            why = f"{_who(lease)} does not return at {still.place}"
            log.warning("loop_blocked seconds=%g: %s", still.seconds, why)
            asyncio.run(self._speak(() if lease is None else tuple(playing), still.seconds, why))

    async def _speak(self, held: tuple[str, ...], seconds: float, why: str) -> None:
        report = m.ComponentReport(doing=BLOCKED, since_s=seconds, why=why)
        beat = m.RenewRequest(worker=self._worker.name, incarnation=self._worker.incarnation, held=held, report=report)
        async with asyncio.timeout(SPEAK_S), self._connect() as dataflow:
            await dataflow.renew(beat)

    async def _give_up(self, lease: Lease, playing: Mapping[str, Lease], message: str) -> None:
        name = self._worker.name
        async with asyncio.timeout(SPEAK_S), self._connect() as dataflow:
            episode = failed(lease, FailureKind.TIMEOUT, message)
            await dataflow.submit(
                m.SubmitRequest(
                    worker=name, group=lease.group, index=lease.index, attempt=lease.attempt, episode=episode
                )
            )
            others = tuple(each for each in playing if each != lease.id)
            await dataflow.hand_back(m.HandBackRequest(worker=name, held=others))


def _who(lease: Lease | None) -> str:
    return "something that is no workflow" if lease is None else f"the workflow of episode {lease.id}"
