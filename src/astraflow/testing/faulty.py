"""A bad network around any ``Dataflow``: calls and replies are lost, late, doubled, overtaken, or cut off for a while.

The wrapper behaves as HTTP does to a client: a request that was sent may still arrive after its sender has died, and a
call that got no answer raises ``Unavailable`` although its effect may have happened. All choices come from the given
``random.Random``; every fault that happened is counted.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from astraflow.errors import AstraFlowError, Unavailable
from astraflow.types import Manifest
from astraflow.wire import messages as m
from astraflow.wire.protocol import Dataflow

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """Chance of each fault per call, from 0 to 1, and how long things take in seconds."""

    drop_request: float = 0.0
    """The call never arrives; the caller learns it after ``timeout_s``."""
    drop_reply: float = 0.0
    """The call has its effect; the caller gets ``Unavailable``."""
    delay_request: float = 0.0
    """The call arrives late, so later ones overtake it."""
    delay_reply: float = 0.0
    duplicate: float = 0.0
    """The network delivers the call a second time, later; nobody reads that answer."""
    latency_s: tuple[float, float] = (0.001, 0.01)
    """Of every request and every reply."""
    delay_s: tuple[float, float] = (0.1, 15.0)
    timeout_s: tuple[float, float] = (0.05, 5.0)
    patience_s: float = 0.0
    """How long a client sends a call again by itself, as ``HttpDataflow`` does, before it raises Unavailable."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not 0 <= value <= 1 and field.name != "patience_s":
                raise ValueError(f"Faults.{field.name} must be in [0, 1], found {value}")

    @staticmethod
    def none(*, patience_s: float = 0.0) -> Faults:
        return Faults(patience_s=patience_s)

    @staticmethod
    def some(rate: float, *, patience_s: float = 0.0) -> Faults:
        """Every fault with the same chance."""
        return Faults(
            drop_request=rate,
            drop_reply=rate,
            delay_request=rate,
            delay_reply=rate,
            duplicate=rate,
            patience_s=patience_s,
        )


class FaultyDataflow:
    """One client's connection. ``counts`` may be shared by all connections of a run."""

    def __init__(self, inner: Dataflow, *, rng: random.Random, faults: Faults, counts: Counter[str]) -> None:
        self.faults = faults
        self._inner = inner
        self._random = rng
        self._counts = counts
        self._cut_until = float("-inf")
        self._closed = False
        self._sent = 0
        self._newest_arrived = 0
        self._flying: set[asyncio.Task[Any]] = set()

    # ── what the simulator does to it ──

    def cut(self, seconds: float) -> None:
        """No call and no reply passes for so long."""
        self._counts["cut"] += 1
        self._cut_until = asyncio.get_running_loop().time() + seconds

    def abandon(self) -> None:
        """The client died: it calls no more. What it has sent is on its way and may still arrive."""
        self._closed = True

    async def aclose(self) -> None:
        """End what still flies, for the end of a test."""
        self._closed = True
        flying = list(self._flying)
        for task in flying:
            task.cancel()
        await asyncio.gather(*flying, return_exceptions=True)

    # ── the protocol ──

    async def hello(self, request: m.HelloRequest) -> m.HelloReply:
        return await self._call(self._inner.hello, request)

    async def lease(self, request: m.LeaseRequest) -> m.LeaseReply:
        return await self._call(self._inner.lease, request)

    async def renew(self, request: m.RenewRequest) -> m.RenewReply:
        return await self._call(self._inner.renew, request)

    async def submit(self, request: m.SubmitRequest) -> m.SubmitReply:
        return await self._call(self._inner.submit, request)

    async def hand_back(self, request: m.HandBackRequest) -> m.Done:
        return await self._call(self._inner.hand_back, request)

    async def resume(self, request: m.ResumeRequest) -> m.ResumeReply:
        return await self._call(self._inner.resume, request)

    async def batch(self, request: m.BatchRequest) -> m.BatchReply:
        return await self._call(self._inner.batch, request)

    async def commit(self, request: m.CommitRequest) -> m.CommitReply:
        return await self._call(self._inner.commit, request)

    async def fail(self, request: m.FailRequest) -> m.FailReply:
        return await self._call(self._inner.fail, request)

    async def publish(self, request: m.PublishRequest) -> m.PublishReply:
        return await self._call(self._inner.publish, request)

    async def manifest(self, request: m.ManifestRequest) -> Manifest:
        return await self._call(self._inner.manifest, request)

    async def report(self, request: m.ReportRequest) -> m.Done:
        return await self._call(self._inner.report, request)

    async def status(self) -> m.StatusReply:
        return await self._call(self._inner.status)

    async def pool(self) -> m.PoolReply:
        return await self._call(self._inner.pool)

    async def events(self, request: m.EventsRequest) -> m.EventsReply:
        return await self._call(self._inner.events, request)

    async def operate(self, request: m.OperatorRequest) -> m.Done:
        return await self._call(self._inner.operate, request)

    # ── the bad network ──

    async def _call(self, method: Callable[..., Awaitable[T]], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + self.faults.patience_s, 0.1
        while True:
            if self._closed:
                raise Unavailable("this client is dead")
            self._sent += 1
            trip = self._fly(self._trip(method, args, number=self._sent))
            try:
                return await asyncio.shield(trip)  # a caller that dies cannot take back what it has sent
            except Unavailable:
                if loop.time() >= deadline:
                    raise
            self._counts["sent_again"] += 1
            await asyncio.sleep(pause * self._random.uniform(0.5, 1.0))
            pause = min(2 * pause, 5.0)

    async def _trip(self, method: Callable[..., Awaitable[T]], args: tuple[Any, ...], *, number: int) -> T:
        await self._travel("delay_request", self.faults.delay_request)
        if self._is_cut() or self._happens("drop_request", self.faults.drop_request):
            await self._time_out("the request was lost")
        if number < self._newest_arrived:
            self._counts["reorder"] += 1
        self._newest_arrived = max(number, self._newest_arrived)
        if self._happens("duplicate", self.faults.duplicate):
            self._fly(self._again(method, args))
        reply = await method(*args)
        if self._is_cut() or self._happens("drop_reply", self.faults.drop_reply):
            await self._time_out("the reply was lost")
        await self._travel("delay_reply", self.faults.delay_reply)
        return reply

    async def _again(self, method: Callable[..., Awaitable[object]], args: tuple[Any, ...]) -> None:
        await asyncio.sleep(self._random.uniform(*self.faults.delay_s))
        try:
            await method(*args)
        except AstraFlowError:
            self._counts["duplicate_refused"] += 1

    async def _travel(self, fault: str, chance: float) -> None:
        seconds = self._random.uniform(*self.faults.latency_s)
        if self._happens(fault, chance):
            seconds += self._random.uniform(*self.faults.delay_s)
        await asyncio.sleep(seconds)

    async def _time_out(self, why: str) -> None:
        await asyncio.sleep(self._random.uniform(*self.faults.timeout_s))
        raise Unavailable(why)

    def _is_cut(self) -> bool:
        return asyncio.get_running_loop().time() < self._cut_until

    def _happens(self, fault: str, chance: float) -> bool:
        happens = chance > 0 and self._random.random() < chance
        self._counts[fault] += happens
        return happens

    def _fly(self, coroutine: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._flying.add(task)
        task.add_done_callback(self._landed)
        return task

    def _landed(self, task: asyncio.Task[Any]) -> None:
        self._flying.discard(task)
        if not task.cancelled():
            task.exception()  # read it: the caller may have died and nobody else will
