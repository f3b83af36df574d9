"""The rollout service: hold as many leases as there are slots and play each to its end. Owns nothing that must survive.

    lease ──► play (workflow, agents, engine) ──► submit          one task per episode
    renew every heartbeat ──► lost leases cancelled, manifests to the subscribers, drain, finished
    subscribers ──► engines                                       weights, off the decode path

| loop       | waits for                      | ended by                                      |
| ---------- | ------------------------------ | --------------------------------------------- |
| lease      | a slot, weights, a lease       | an episode's end, the subscriber, dataflow    |
| heartbeat  | the next beat                  | the clock                                     |
| an episode | the engine, the grader, submit | its time limit, a lost lease, ``patience_s``  |

A bug in one episode is data; a bug here stops the worker, and its leases run out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

import msgspec

from astraflow.clock import Clock, SystemClock
from astraflow.disk import SPACE_PATIENCE_S
from astraflow.errors import (
    AstraFlowError,
    BadRequest,
    Closed,
    EngineFailed,
    Fenced,
    NameTaken,
    StorageFull,
    TooLarge,
    Unavailable,
    UnknownLease,
)
from astraflow.observe.points import reach
from astraflow.observe.waits import Wait
from astraflow.rollout.activity import Activity
from astraflow.rollout.elsewhere import Elsewhere
from astraflow.rollout.newcomers import Newcomers
from astraflow.rollout.play import Player, classify, failed
from astraflow.rollout.served import Relay, ServedPolicy, watch_weights, worst_trouble
from astraflow.rollout.settings import RolloutSettings
from astraflow.types import Episode, FailureKind, Lease, Manifest, Outcome
from astraflow.wire import messages as m
from astraflow.wire.goodbye import DRAINED, ENDED, TOLD, say_goodbye
from astraflow.wire.protocol import Dataflow

log = logging.getLogger("astraflow.rollout")
T = TypeVar("T")

LONGEST_PAUSE_S = 5.0
NAME_PATIENCE_S = 15.0


class RolloutService:
    """``players``: by the task's ``workflow``; ``""`` plays the recipe's own. ``run`` may be called once."""

    def __init__(
        self,
        *,
        name: str,
        incarnation: str,
        dataflow: Dataflow,
        players: Mapping[str, Player],
        policies: Mapping[str, ServedPolicy],
        capabilities: m.Capabilities,
        settings: RolloutSettings,
        elsewhere: Elsewhere | None = None,
        clock: Clock | None = None,
        activity: Activity | None = None,
        relay: Relay | None = None,
        config: Mapping[str, str] | None = None,
        newcomers: Newcomers | None = None,
    ) -> None:
        """``relay``: the worker's place among others that share weights. ``config``: told with the first call."""
        self.name = name
        self._relay, self._config = relay, dict(config or {})
        self.activity = activity or Activity(clock or SystemClock())
        watch_weights(self.activity, policies)
        self.incarnation = incarnation
        self.heartbeat_s = 2.0
        self.playing: dict[str, Lease] = {}
        """By lease id."""
        self._dataflow = dataflow
        self._players = players
        self._policies = policies
        self._capabilities = capabilities
        self._settings = settings
        self._elsewhere, self._newcomers = elsewhere or Elsewhere(), newcomers
        self._clock = clock or SystemClock()
        self._held: dict[str, asyncio.Task[None]] = {}
        self._unfinished: set[str] = set()
        """Leases that are ours and whose episode dataflow does not have yet."""
        self._free = asyncio.Event()
        self._drain = asyncio.Event()
        self._said_at = float("-inf")
        self._leave = asyncio.Event()
        self._because = ""
        """Why it drains."""

    async def run(self) -> None:
        """Until the run is finished, dataflow drains this worker, or ``stop``. Raises ConfigMismatch, NameTaken, and
        the first cause if the worker cannot go on."""
        await self._greet()
        try:
            await self._serve()
        except BaseExceptionGroup as group:
            raise _first(group) from group
        else:
            await say_goodbye(self._dataflow, "rollout", self.name, self.incarnation, self._report(), why=self._because)
        finally:
            await self._elsewhere.close()
            for policy in tuple(self._policies.values()):
                await policy.engine.close()

    def stop(self) -> None:
        """Take no more leases and end within ``drain_grace_s``; called again: at once."""
        if self._drain.is_set():
            self._leave.set()
        self._drain_because(TOLD)

    def _drain_because(self, why: str) -> None:
        self._because = self._because or why
        self._drain.set()

    async def hold(self, policy: str, version: int) -> None:
        """For agents of pinned leases: raises EngineFailed when the version cannot be had here."""
        if policy in self._elsewhere.engines:
            return  # whoever serves it is told the version with every request
        if policy not in self._policies:
            raise EngineFailed(f"this worker does not serve policy {policy!r}; it serves {sorted(self._policies)}")
        with self.activity.waiting(Wait.WEIGHTS, f"{policy} version {version}"):
            await self._policies[policy].hold(version, self._dataflow, deadline_s=self._settings.patience_s)

    async def _greet(self) -> None:
        hello = m.HelloRequest(
            component="rollout",
            name=self.name,
            incarnation=self.incarnation,
            config_digest=self._capabilities.config_digest,
            code_digest=self._capabilities.code_digest,
            config=self._config,
        )
        deadline = self._clock.monotonic() + NAME_PATIENCE_S
        while True:
            try:
                reply = await self._patiently(lambda: self._dataflow.hello(hello))
            except NameTaken:  # the process that this one replaces may have been heard a moment ago
                if self._clock.monotonic() >= deadline:
                    raise
                await asyncio.sleep(1.0)
            else:
                self.heartbeat_s = reply.heartbeat_s
                return

    async def _serve(self) -> None:
        own = tuple(self._policies.values())  # the heartbeat brings others, which are started where they join
        async with asyncio.TaskGroup() as loops:
            heart = loops.create_task(self._heartbeat_loop(loops))
            followers: list[asyncio.Task[None]] = []
            try:
                await self._elsewhere.start()
                for policy in own:  # may take long: dataflow hears meanwhile that we live
                    await policy.engine.start()
                followers += [loops.create_task(policy.subscriber.run()) for policy in own]
                async with asyncio.TaskGroup() as episodes:
                    await self._lease_loop(episodes)
                    await self._finish_episodes()
            finally:
                await self._hand_back()
                for task in (heart, *followers):
                    task.cancel()
                if self._newcomers is not None:
                    self._newcomers.leave()

    # ── leases ──

    async def _lease_loop(self, episodes: asyncio.TaskGroup) -> None:
        await self._until_weights()
        while not self._drain.is_set():
            trouble = worst_trouble(self._policies)
            if trouble is not None and trouble.out:  # what it would sample now, nobody could train
                await self._until_weights()
                continue
            if len(self._held) >= self._settings.slots:
                self._free.clear()
                await self._unless_draining(self._free.wait(), Wait.SLOT)
                continue
            reply = await self._unless_draining(self._lease(), Wait.LEASE)
            if reply is None:
                return
            self._offer(reply.manifests)
            reach("rollout.after_lease")
            for lease in reply.leases:
                self._start(lease, episodes)
            if reply.finished:
                self._finish()
            self.activity.why = reply.reason or ""

    async def _lease(self) -> m.LeaseReply:
        request = m.LeaseRequest(
            worker=self.name,
            incarnation=self.incarnation,
            count=self._settings.slots - len(self._held),
            capabilities=self._can(),
            wait_s=self._settings.lease_wait_s,
            versions=self._versions(),
        )
        return await self._patiently(lambda: self._dataflow.lease(request))

    def _can(self) -> m.Capabilities:
        """With what is served elsewhere, as long as it is."""
        return msgspec.structs.replace(self._capabilities, policies=(*self._policies, *self._elsewhere.reachable))

    def _start(self, lease: Lease, episodes: asyncio.TaskGroup) -> None:
        task = episodes.create_task(self._run_one(lease), name=f"episode {lease.id}")
        self._held[lease.id] = task
        self.playing[lease.id] = lease
        self._unfinished.add(lease.id)
        self.activity.count("lease/taken")
        self.activity.playing(len(self._held))
        task.add_done_callback(lambda _: self._release(lease.id))

    def _release(self, lease_id: str) -> None:
        self._held.pop(lease_id, None)
        self.playing.pop(lease_id, None)
        self.activity.playing(len(self._held))
        self._free.set()

    async def _until_weights(self) -> None:
        """No lease before every engine holds a version that may serve: the first beats bring the manifests."""
        for policy in tuple(self._policies.values()):  # others may join meanwhile, with their weights
            await self._unless_draining(policy.until_fit(deadline_s=self._settings.patience_s), Wait.WEIGHTS)

    # ── one episode ──

    async def _run_one(self, lease: Lease) -> None:
        with ExitStack() as pins:
            for name, version in lease.versions.items():
                if name in self._policies:
                    pins.enter_context(self._policies[name].pinned(version))
            episode = await self._play(lease)
        self._observe(episode)
        await self._submit(lease, episode)
        self._unfinished.discard(lease.id)

    async def _play(self, lease: Lease) -> Episode:
        player = self._players.get(lease.task.workflow)
        if player is None:
            message = f"this worker has no workflow {lease.task.workflow!r}; it has {sorted(self._players)}"
            return failed(lease, FailureKind.INFRA, message)
        try:
            return await player(lease)
        except Exception as error:  # noqa: BLE001 - one episode's bug is data: it must not end the others (F81)
            return failed(lease, *classify(error))

    async def _submit(self, lease: Lease, episode: Episode) -> None:
        at = {"group": lease.group, "index": lease.index, "attempt": lease.attempt}
        request = m.SubmitRequest(worker=self.name, episode=episode, **at)
        try:
            reach("rollout.before_submit")
            await self._patiently(lambda: self._dataflow.submit(request))
            reach("rollout.after_submit")
        except (Fenced, Closed, UnknownLease) as error:  # someone else owns it now: ours is worthless, not wrong
            self.activity.count(f"refused/{error.kind.lower()}")
        except (BadRequest, TooLarge) as error:
            if episode.outcome is Outcome.FAILED:
                raise
            self.activity.count("refused/episode")
            kind = FailureKind.WORKFLOW if isinstance(error, TooLarge) else FailureKind.INFRA
            await self._submit(lease, failed(lease, kind, f"dataflow refused the episode: {error}"))

    def _observe(self, episode: Episode) -> None:
        self.activity.count(f"episode/{episode.failure or episode.outcome}")
        for trajectory in episode.trajectories:
            for turn in trajectory.turns:
                self.activity.count("token/sampled", turn.stop - turn.start)

    # ── heartbeat ──

    async def _heartbeat_loop(self, loops: asyncio.TaskGroup) -> None:
        while True:
            held = tuple(self._held)
            beat = m.RenewRequest(worker=self.name, incarnation=self.incarnation, held=held, report=self._report())
            reply = await self._patiently(lambda beat=beat: self._dataflow.renew(beat))  # type: ignore[misc]
            if self._relay is not None:
                self._relay.know(reply.relays)
            self._offer(reply.manifests)
            await self._elsewhere.know(reply.endpoints)
            if self._newcomers is not None:
                self._newcomers.hear(reply.added, loops)
            for lease_id in reply.lost:
                self._unfinished.discard(lease_id)
                if lease_id in self._held:
                    self.activity.count("lease/lost")
                    self._held[lease_id].cancel()
            if reply.finished:
                self._finish()
            elif reply.drain:
                self._drain_because(DRAINED)
            await asyncio.sleep(self.heartbeat_s)

    def _report(self) -> m.ComponentReport:
        report = msgspec.structs.replace(self.activity.report(self._versions()), endpoint=self._elsewhere.url)
        if self._relay is None:
            return report
        metrics = {**report.metrics, **self._relay.metrics()}
        return msgspec.structs.replace(report, metrics=metrics, region=self._relay.region, relay=self._relay.url)

    def _versions(self) -> dict[str, int]:
        loaded = {name: policy.subscriber.loaded for name, policy in self._policies.items()}
        return {name: manifest.version for name, manifest in loaded.items() if manifest is not None}

    def _offer(self, manifests: Mapping[str, Manifest]) -> None:
        for name, manifest in manifests.items():
            if name in self._policies:
                self._policies[name].subscriber.offer(manifest)

    # ── the end ──

    def _finish(self) -> None:
        """The run needs nothing more: what is still played is worthless."""
        self._drain_because(ENDED)
        self._leave.set()

    async def _finish_episodes(self) -> None:
        """After the last lease: let episodes end, then take them back and say which will not be finished."""
        running = dict(self._held)
        if running and not self._leave.is_set():
            ended = asyncio.ensure_future(asyncio.wait(running.values()))
            leaving = asyncio.ensure_future(self._leave.wait())
            await asyncio.wait({ended, leaving}, timeout=self._settings.drain_grace_s, return_when="FIRST_COMPLETED")
            for task in (ended, leaving):
                task.cancel()
        await self._hand_back()

    async def _hand_back(self) -> None:
        running = dict(self._held)
        for task in running.values():
            task.cancel()
        if running:
            await asyncio.wait(running.values(), timeout=2 * self._settings.cancel_grace_s)
        if not self._unfinished:
            return
        unfinished, self._unfinished = sorted(self._unfinished), set()
        self.activity.count("lease/handed_back", len(unfinished))
        request = m.HandBackRequest(worker=self.name, held=tuple(unfinished))
        try:
            async with asyncio.timeout(LONGEST_PAUSE_S):
                await self._dataflow.hand_back(request)
        except (AstraFlowError, TimeoutError) as error:  # the leases then run out by themselves
            log.warning("hand_back_failed worker=%s leases=%d error=%s", self.name, len(unfinished), error)

    # ── patience ──

    async def _unless_draining(self, awaitable: Coroutine[Any, Any, T], wait: Wait) -> T | None:
        """Its result, or None (and it is cancelled) once the worker drains."""
        call = asyncio.ensure_future(awaitable)
        drain = asyncio.ensure_future(self._drain.wait())
        try:
            with self.activity.waiting(wait):
                await asyncio.wait({call, drain}, return_when="FIRST_COMPLETED")
            return call.result() if call.done() else None
        finally:
            for task in (call, drain):
                task.cancel()

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Its result; called again, and said to be, while dataflow is out of reach (``patience_s``) or has no space."""
        began = self._clock.monotonic()
        pause = 0.1
        while True:
            try:
                return await call()
            except (Unavailable, StorageFull) as error:
                now, full = self._clock.monotonic(), isinstance(error, StorageFull)
                limit, wait = (SPACE_PATIENCE_S, Wait.STORAGE) if full else (self._settings.patience_s, Wait.DATAFLOW)
                if now - began >= limit:
                    raise type(error)(f"dataflow was out of reach for {now - began:.0f} s: {error}") from error
                if now - max(began, self._said_at) >= LONGEST_PAUSE_S:  # one of all that wait says it
                    self._said_at = now
                    log.warning("waits_for_dataflow for_s=%.0f patience_s=%.0f: %s", now - began, limit, error)
                with self.activity.waiting(wait, str(error)):
                    await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first cause: nested groups say nothing."""
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
