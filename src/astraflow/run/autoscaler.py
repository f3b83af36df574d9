"""Follows ``GET /v1/pool/target`` with workers of its own: starts some when it says grow, stops some when shrink.

    dataflow: measure, decide (dataflow/autoscale.py) ─► steps (pure) ─► actuator: processes, or two commands

It stops only what it started. It keeps nothing that must survive: started again it finds its workers by their names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from astraflow.clock import Clock, SystemClock
from astraflow.dataflow.autoscale import GROW, SHRINK
from astraflow.errors import ConfigError, RunFailed, Unavailable
from astraflow.run.actuators import Actuator, names_from
from astraflow.wire.messages import PoolReply
from astraflow.wire.protocol import Dataflow

log = logging.getLogger("astraflow.autoscale")

FAILURES = 3
"""Starts in a row of which none came to serve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """What is to be done now."""

    start: int = 0
    stop: tuple[str, ...] = ()


@dataclass(kw_only=True, slots=True)
class Fleet:
    """The autoscaler's own workers by name, oldest first."""

    starting: dict[str, float] = field(default_factory=dict)
    """Since when; dataflow has not seen them serve yet."""
    serving: list[str] = field(default_factory=list)
    stopping: set[str] = field(default_factory=set)

    def see(self, pool: PoolReply, ended: Sequence[str], *, prefix: str) -> None:
        """Take note of what dataflow sees, and of what has ended."""
        alive = {each.name: each for each in pool.workers if each.state == "alive"}
        ours = [name for name in alive if name.startswith(f"{prefix}-")]
        for name in ended:
            self._forget(name)
        for name in ours:
            if not alive[name].reason and name not in (*self.serving, *self.stopping, *ended):
                self.starting.pop(name, None)
                self.serving.append(name)
        for name in [name for name in (*self.serving, *self.stopping) if name not in alive]:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self.starting.pop(name, None)
        self.serving = [each for each in self.serving if each != name]
        self.stopping.discard(name)


def steps(pool: PoolReply, fleet: Fleet) -> Steps:
    """From the target to what is to be done; what is on its way already is not done twice."""
    coming = len(fleet.starting)
    target = pool.target
    if target.action == GROW:
        return Steps(start=max(0, target.target - target.workers - coming))
    if target.action == SHRINK and not coming:
        leaving = sum(each.name in fleet.stopping and not each.reason for each in pool.workers)
        surplus = max(0, target.workers - leaving - target.target)
        return Steps(stop=tuple(reversed(fleet.serving))[:surplus])
    return Steps()


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoscalerSettings:
    prefix: str = "auto"
    poll_s: float = 5.0
    start_s: float = 300.0
    """A worker that does not serve after so long has failed to start."""
    patience_s: float = 300.0
    """How long dataflow may be away, if nobody knows that the run has ended."""

    def __post_init__(self) -> None:
        for name in ("poll_s", "start_s", "patience_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"AutoscalerSettings.{name} must be in (0, inf) s, found {getattr(self, name)}")


class Autoscaler:
    """``run`` until the run of the dataflow has ended, or it is cancelled."""

    def __init__(
        self,
        dataflow: Dataflow,
        actuator: Actuator,
        settings: AutoscalerSettings,
        *,
        clock: Clock | None = None,
        say: Callable[[str], None] = lambda _: None,
        has_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        """``has_ended``: asked while dataflow is away, whether that is because the run is over."""
        self._has_ended = has_ended
        self._dataflow = dataflow
        self._actuator = actuator
        self._settings = settings
        self._clock = clock or SystemClock()
        self._say = say
        self._named: list[str] = []
        self._failures = 0
        self.fleet = Fleet()

    async def run(self) -> None:
        """Raises RunFailed when workers cannot be started, or dataflow does not come back."""
        seen = self._clock.monotonic()
        try:
            while True:
                try:
                    pool = await self._dataflow.pool()
                except Unavailable as error:  # dataflow is started again; workers wait for it too
                    if self._has_ended():
                        return
                    self._require_patience(seen, error)
                else:
                    seen = self._clock.monotonic()
                    if pool.state != "running":
                        return
                    await self.turn(pool)
                await asyncio.sleep(self._settings.poll_s)
        finally:
            await self._actuator.close()

    def _require_patience(self, seen: float, error: Unavailable) -> None:
        away = self._clock.monotonic() - seen
        if away >= self._settings.patience_s:
            raise RunFailed(f"no dataflow has answered for {away:.0f} s: {error}") from error
        log.warning("pool_unavailable for_s=%.0f error=%s", away, error)

    async def turn(self, pool: PoolReply) -> None:
        """Look, and do what is to be done."""
        fleet, now = self.fleet, self._clock.monotonic()
        ended = self._actuator.ended()
        before = set(fleet.serving)
        self._fail([name for name in ended if name in fleet.starting], "ended before it served")
        fleet.see(pool, ended, prefix=self._settings.prefix)
        if set(fleet.serving) - before:
            self._failures = 0
        late = [name for name, since in fleet.starting.items() if now - since >= self._settings.start_s]
        for name in late:
            del fleet.starting[name]
            await self._stop(name)
        self._fail(late, f"did not serve within {self._settings.start_s:g} s")
        wanted = steps(pool, fleet)
        if wanted.start or wanted.stop:
            self._say(f"{pool.target.action} from {pool.target.workers} to {pool.target.target}: {pool.target.reason}")
        for _ in range(wanted.start):
            if not await self._start(pool):
                break  # the others may try again with the next turn
        for name in wanted.stop:
            if await self._stop(name):
                fleet.serving.remove(name)
                fleet.stopping.add(name)

    async def _start(self, pool: PoolReply) -> bool:
        """Whether that could be begun; a start that fails is one of those in a row."""
        name = names_from(self._settings.prefix, [*self._named, *(each.name for each in pool.workers)])
        self._named.append(name)
        self.fleet.starting[name] = self._clock.monotonic()
        try:
            await self._actuator.start(name)
        except RunFailed as error:
            del self.fleet.starting[name]
            self._fail([name], f"could not be started: {error}")
            return False
        return True

    async def _stop(self, name: str) -> bool:
        """Whether that could be begun; if not, the worker is as it was, and the next turn may try again."""
        try:
            await self._actuator.stop(name)
        except RunFailed as error:  # it has just ended by itself, or whoever stops workers is busy
            log.warning("stop_failed name=%s error=%s", name, error)
            return False
        return True

    def _fail(self, names: Sequence[str], why: str) -> None:
        for name in names:
            self._failures += 1
            known = self._actuator.words(name)
            said = f"{why}: {known}" if known else why
            log.warning("worker_failed name=%s %s", name, said)
            if self._failures == FAILURES:
                raise RunFailed(f"{FAILURES} workers in a row could not be had: {name} {said}")
