"""The dataflow service: the calls of ``Dataflow`` over the ledger, with a clock, long polls and group commit.

    lease   admit groups as Pace allows, give what ``assign`` chooses
    submit  store; the last episode of a group makes it ready; then settle: kept or dropped per policy
    batch   the frozen one, else cut one from what Select picks
    commit  version + 1; evaluations open; whoever waits is woken

What each wait ends by: a lease by room, a retry or a new evaluation; a batch by a kept group; both by the end of the
run, and in any case by the caller's own deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, TypeVar

from astraflow.clock import Clock, SystemClock
from astraflow.dataflow import trainers
from astraflow.dataflow.commits import Commits
from astraflow.dataflow.components import ROLLOUT, TRAINER
from astraflow.dataflow.cutting import try_batch
from astraflow.dataflow.handshake import require_same, require_same_worker
from astraflow.dataflow.league import publish_average
from astraflow.dataflow.leasing import try_lease
from astraflow.dataflow.ledger import USER_CODE, Ledger
from astraflow.dataflow.pool import Pool
from astraflow.dataflow.retention import Retention
from astraflow.dataflow.settings import RunSpec
from astraflow.dataflow.settling import settle_ready
from astraflow.dataflow.status import events, status
from astraflow.dataflow.store import connect, lock_run
from astraflow.dataflow.sweeps import goodbye, sweep
from astraflow.dataflow.watchdog import Watchdog
from astraflow.errors import BadRequest, StorageFull, Unavailable
from astraflow.types import Manifest
from astraflow.wire import messages as m

R = TypeVar("R", m.LeaseReply, m.BatchReply)

LEASE = "lease"
MAX_LEASES = 4096
LAGS = 60
"""Ticks over which the worst lag of the event loop is shown: about a minute."""


class DataflowService:
    """One per run. Give ``run`` a task of its own: it is the passing of time."""

    def __init__(
        self,
        spec: RunSpec,
        ledger: Ledger,
        *,
        clock: Clock | None = None,
        lock: IO[bytes] | None = None,
        in_thread: bool = False,
    ) -> None:
        self.spec = spec
        self.ledger = ledger
        self._clock = clock or SystemClock()
        self._commits = Commits(
            ledger, self._clock, last=self._last, after=self._after, undone=self._undone, in_thread=in_thread
        )
        ledger.time_text = self._time_of_day
        self._lock = lock
        self._watchdog = Watchdog(ledger, self._commits.now)
        self._retention = Retention(ledger)
        self._pool = Pool(ledger)
        self._marks: set[str] = set()
        self._generation: dict[str, int] = {}
        self._waiting: dict[str, asyncio.Event] = {}
        self._closed = False
        self._lags_s: deque[float] = deque([0.0], maxlen=LAGS)
        """How late the last ticks were: the loop was busy."""

    @classmethod
    def open(
        cls, spec: RunSpec, folder: Path, *, clock: Clock | None = None, in_thread: bool = False
    ) -> DataflowService:
        """Serve the run in ``folder`` (run.db, payloads/). Conflict while another dataflow does.

        ``in_thread``: calls are read and decoded while the disk is awaited; not for virtual time.
        """
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_run(folder)
        try:
            ledger = Ledger(connect(folder / "run.db"), spec, payloads=folder / "payloads")
            return cls(spec, ledger, clock=clock, lock=lock, in_thread=in_thread)
        except BaseException:  # tolerates nothing: it is raised on, and the run is not left locked
            lock.close()
            raise

    # ── life ──

    async def run(self) -> None:
        """Sweep leases, deaths and starvation until the run's process ends. Never returns by itself."""
        loop = asyncio.get_running_loop()
        interval = min(1.0, self.spec.limits.heartbeat_s / 2)
        while not self._closed:
            due = loop.time() + interval
            await asyncio.sleep(interval)
            self._lags_s.append(max(0.0, loop.time() - due))
            with suppress(StorageFull):  # logged where it was found; the next tick tries again
                await self.tick()

    def _time_of_day(self, at: float) -> str:
        """For people: what this machine's clock showed at a logical time."""
        return time.strftime("%H:%M:%S", time.localtime(self._clock.wall() - (self._commits.now - at)))

    async def tick(self) -> None:
        """One sweep now."""
        await self._commits.write(self._tick)

    async def close(self) -> None:
        """Refuse what waits and let go of the file; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._commits.close()
        for event in self._waiting.values():
            event.set()
        await self._commits.drained()
        self.ledger.store.connection.close()
        if self._lock is not None:
            self._lock.close()

    async def publish_initial(self, manifest: Manifest) -> None:
        """Version 0 of a policy, from the launcher; again is fine. Raises UnknownVersion for other weights."""

        def transition(now: float) -> None:
            self.ledger.publish_initial(now, manifest)
            self._mark(LEASE)

        await self._commits.write(transition)

    async def live_manifests(self) -> tuple[Manifest, ...]:
        """What the weight store must keep: newest and previous versions, resumed ones, and what evaluations pin."""
        return await self._commits.read(self.ledger.live_manifests)

    # ── waking ──

    def _mark(self, *topics: str) -> None:
        """Whoever waits for one of these tries again once the transaction is on disk."""
        self._marks.update(topics)

    def _mark_all(self) -> None:
        self._mark(LEASE, *self.ledger.policies.trainable)

    def _last(self) -> Callable[[float], None] | None:
        """What has all its episodes is settled with the last of them: an algorithm that raises undoes only that."""
        return self._settle if self.ledger.groups.any_ready and self.ledger.state == "running" else None

    def _after(self) -> None:
        self._retention.remove_files()
        for topic in sorted(self._marks):  # whoever is woken first asks first: no hash decides that
            self._generation[topic] = self._generation.get(topic, 0) + 1
            event = self._waiting.pop(topic, None)
            if event is not None:
                event.set()
        self._marks.clear()

    def _undone(self) -> None:
        """A transaction failed as a whole: what is ready is settled with the next one."""
        self._marks.clear()
        self._retention.forget()

    async def _poll(self, topic: str, wait_s: float, attempt: Callable[[float], R], enough: Callable[[R], bool]) -> R:
        """Try, and again whenever the topic changes, until there is enough or the caller's time is over."""
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            seen = self._generation.get(topic, 0)
            reply = await self._commits.write(attempt)
            if enough(reply) or not await self._changed(topic, seen, deadline):
                return reply

    async def _changed(self, topic: str, seen: int, deadline: float) -> bool:
        if self._generation.get(topic, 0) != seen:
            return True
        event = self._waiting.setdefault(topic, asyncio.Event())
        try:
            async with asyncio.timeout_at(deadline):
                await event.wait()
        except TimeoutError:
            return False
        return not self._closed

    def _settle(self, now: float) -> None:
        settle_ready(self.ledger, now)
        self._mark_all()

    def _tick(self, now: float) -> None:
        if sweep(self.ledger, now):
            self._mark_all()
        if self._watchdog.look(now):
            self._mark_all()
        self._retention.begin()
        self._pool.look(now)
        self._prune(now)

    def _prune(self, now: float) -> None:
        """A slice with this transaction; the rest with the next ones, among the calls that come."""
        if self._retention.prune(now):
            self._commits.post(self._prune)

    # ── rollout side ──

    async def hello(self, request: m.HelloRequest) -> m.HelloReply:
        spec = self.spec
        require_same(spec, request)
        _require_component(request.component)
        await self._commits.write(lambda now: self._heard(now, request.component, request.name, request.incarnation))
        return m.HelloReply(
            run=spec.run,
            config_digest=spec.config_digest,
            heartbeat_s=spec.limits.heartbeat_s,
            dead_after_s=spec.limits.dead_after_s,
        )

    def _heard(self, now: float, component: str, name: str, incarnation: str) -> None:
        replaced = self.ledger.components.heard(now, component, name, incarnation)
        if replaced and component == ROLLOUT and sweep(self.ledger, now, gone=name):
            self._mark(LEASE)

    async def lease(self, request: m.LeaseRequest) -> m.LeaseReply:
        if not 0 <= request.count <= MAX_LEASES:
            raise BadRequest(f"LeaseRequest.count must be in [0, {MAX_LEASES}], found {request.count}")
        require_same_worker(self.spec, request)
        came = False

        def attempt(now: float) -> m.LeaseReply:
            nonlocal came
            if came:  # the poll is ours: who waits at its other end may have died since
                self.ledger.components.require_current(ROLLOUT, request.worker, request.incarnation)
            else:
                self._heard(now, ROLLOUT, request.worker, request.incarnation)
                came = True
            reply = try_lease(self.ledger, now, request)
            if reply.finished:
                self._mark_all()
            return reply

        return await self._poll(
            LEASE, request.wait_s, attempt, lambda r: bool(r.leases) or r.finished or request.count == 0
        )

    async def renew(self, request: m.RenewRequest) -> m.RenewReply:
        def transition(now: float) -> m.RenewReply:
            self._heard(now, ROLLOUT, request.worker, request.incarnation)
            ledger = self.ledger
            ledger.components.said(ROLLOUT, request.worker, request.report)
            return m.RenewReply(
                lost=ledger.episodes.renew(now, request.worker, request.held),
                manifests=ledger.policies.newest.copy(),
                endpoints=ledger.components.endpoints(request.worker),
                added=tuple(ledger.policies.added.values()),
                drain=ledger.components.drains(request.worker),
                finished=ledger.state != "running",
                relays=ledger.components.relays(request.worker, request.report.region),
            )

        return await self._commits.write(transition)

    async def submit(self, request: m.SubmitRequest) -> m.SubmitReply:
        def transition(now: float) -> m.SubmitReply:
            ledger = self.ledger
            done = ledger.episodes.submit(
                now, request.worker, request.group, request.index, request.attempt, request.episode
            )
            if request.episode.failure is not None and not done.duplicate:
                self._mark(LEASE)
                if request.episode.failure in USER_CODE:
                    self._watchdog.first_failures(now)
            if done.ready and ledger.evals.close_ready(now):
                ledger.finish_if_done(now)
                self._mark_all()
            return m.SubmitReply(duplicate=done.duplicate, group_closed=done.ready)

        return await self._commits.write(transition)

    async def hand_back(self, request: m.HandBackRequest) -> m.Done:
        def transition(now: float) -> m.Done:
            self.ledger.episodes.hand_back(now, request.worker, request.held)
            self._mark(LEASE)
            return m.Done()

        return await self._commits.write(transition)

    # ── trainer side ──

    async def resume(self, request: m.ResumeRequest) -> m.ResumeReply:
        def transition(now: float) -> m.ResumeReply:
            reply = trainers.resume(self.ledger, now, request)
            self._heard(now, TRAINER, request.trainer, request.incarnation)
            self._mark_all()
            return reply

        return await self._commits.write(transition)

    async def batch(self, request: m.BatchRequest) -> m.BatchReply:
        self.ledger.policies.require(request.policy, trainable=True)

        came = False

        def attempt(now: float) -> m.BatchReply:
            nonlocal came
            heard, came = not came, True
            return try_batch(self.ledger, now, request, heard=heard)

        return await self._poll(request.policy, request.wait_s, attempt, lambda r: r.batch is not None or r.finished)

    async def commit(self, request: m.CommitRequest) -> m.CommitReply:
        def transition(now: float) -> m.CommitReply:
            reply = trainers.commit(self.ledger, now, request)
            self._mark_all()
            return reply

        return await self._commits.write(transition)

    async def publish(self, request: m.PublishRequest) -> m.PublishReply:
        return await self._commits.write(lambda now: publish_average(self.ledger, now, request))

    async def fail(self, request: m.FailRequest) -> m.FailReply:
        def transition(now: float) -> m.FailReply:
            reply = trainers.fail(self.ledger, now, request)
            self._mark_all()
            return reply

        return await self._commits.write(transition)

    # ── everyone ──

    def _require_open(self) -> None:
        if self._closed:
            raise Unavailable("dataflow is closed")

    async def manifest(self, request: m.ManifestRequest) -> Manifest:
        self._require_open()
        return await self._commits.read(lambda: self.ledger.policies.manifest(request.policy, request.version))

    async def report(self, request: m.ReportRequest) -> m.Done:
        _require_component(request.component)

        def transition(now: float) -> m.Done:
            if request.leaving:  # a successor that has the name by now does not leave with its predecessor
                self.ledger.components.require_current(request.component, request.name, request.incarnation)
            self._heard(now, request.component, request.name, request.incarnation)
            self.ledger.components.said(request.component, request.name, request.report)
            if request.leaving and goodbye(self.ledger, now, request.component, request.name):
                self._mark_all()
            return m.Done()

        return await self._commits.write(transition)

    async def status(self) -> m.StatusReply:
        self._require_open()
        return await self._commits.read(
            lambda: status(self.ledger, self._commits.now, lags_s=tuple(self._lags_s), full_at=self._commits.full_at)
        )

    async def pool(self) -> m.PoolReply:
        self._require_open()
        return await self._commits.read(lambda: self._pool.reply(self._commits.now))

    async def events(self, request: m.EventsRequest) -> m.EventsReply:
        self._require_open()
        return await self._commits.read(lambda: events(self.ledger.store, request))

    async def operate(self, request: m.OperatorRequest) -> m.Done:
        def transition(now: float) -> m.Done:
            trainers.operate(self.ledger, now, request)
            self._mark_all()
            return m.Done()

        return await self._commits.write(transition)


def _require_component(component: str) -> None:
    if component not in (ROLLOUT, TRAINER):
        raise BadRequest(f"a component is {ROLLOUT} or {TRAINER}, found {component[:40]!r}")
