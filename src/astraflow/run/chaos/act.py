"""Does the faults of a plan to a run that a supervisor keeps going, and watches how it comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from astraflow.errors import RunFailed
from astraflow.observe.points import give_order
from astraflow.run.chaos.evidence import Tail, read_versions
from astraflow.run.chaos.injury import Injury, Sighting
from astraflow.run.chaos.plan import Component, Fault, Kind
from astraflow.run.chaos.proxy import Proxy
from astraflow.run.chaos.second import second_trainer
from astraflow.run.child import Child
from astraflow.run.layout import RunFolder
from astraflow.run.supervisor import Supervisor

LOOK_S = 0.1
VICTIM_S = 180.0
"""How long it may take until there is a process to be hurt."""
POINT_S = 60.0
"""How long it may take until somebody comes by a named point; then it is a plain kill."""
REFUSED_S = 30.0
"""How long a trainer that was replaced may go on."""
AHEAD = 2
"""Steps beyond the version of the stopped trainer that its successor commits before that one may go on: the next step
of either is then one that the other does not have."""
RECOVERY_S = 180.0
"""How long a recovery may take until it counts as none."""
MORE_STEPS = 5
"""Committed after the last fault before the run is stopped."""


@dataclass(kw_only=True, slots=True)
class _Living:
    """The process at a post."""

    name: str
    child: Child
    started_at: float


class Actor:
    """The supervisor's ``Watcher``. ``injuries`` fills as ``play`` goes on."""

    def __init__(self, run: RunFolder, orders: Path, *, say: Callable[[str], None] = lambda _: None) -> None:
        """``orders``: the folder that ASTRAFLOW_CHAOS names."""
        self.injuries: list[Injury] = []
        self.unexpected: list[str] = []
        """Deaths that no fault explains, in words."""
        self.missed_points = 0
        self.not_refused = 0
        """Trainers that went on after another one had taken over."""
        self._run, self._orders, self._say = run, orders, say
        self._living: dict[str, _Living] = {}
        self._pids: dict[int, tuple[str, str]] = {}
        """Post and name of every process that was ever started."""
        self._probes: list[Injury] = []
        """Watched, and not counted."""
        self._hurt: set[str] = set()
        """Posts whose fault is not over."""
        self._proxies: dict[str, Proxy] = {}
        self._ports: dict[str, int] = {}
        self._tail = Tail(run)
        self._changed = asyncio.Condition()

    # ── what the supervisor asks and tells ──

    async def open_ways(self, posts: Sequence[str]) -> None:
        """A proxy for each of these, before the supervisor starts them."""
        for post in posts:
            self._proxies[post] = Proxy()
            self._ports[post] = await self._proxies[post].open()

    def route(self, post: str, url: str) -> str:
        parts = urlsplit(url)
        self._proxies[post].lead_to(str(parts.hostname), int(parts.port or 80))
        return f"{parts.scheme}://127.0.0.1:{self._ports[post]}"

    def started(self, post: str, name: str, child: Child) -> None:
        now = time.monotonic()
        self._living[post] = _Living(name=name, child=child, started_at=now)
        self._pids[child.pid] = (post, name)
        for injury in self.injuries:
            if injury.post == post and injury.recovered_at is None and injury.at <= now:
                injury.restarted(name, now)

    def died(self, post: str, name: str, child: Child) -> None:
        if post not in self._hurt and not self._ordered():
            self.unexpected.append(f"{name} died with {child.code}: {child.last_words(3)}")
            self._say(self.unexpected[-1])

    def _ordered(self) -> bool:
        """Whether somebody may just have taken an order to die."""
        return any(self._orders.iterdir())

    # ── the plan ──

    async def play(self, plan: Sequence[Fault], supervisor: Supervisor) -> None:
        """All of it, then a few more committed steps. Raises RunFailed where nothing can be hurt any more."""
        watching = asyncio.ensure_future(self._watch())
        try:
            async with asyncio.TaskGroup() as faults:
                going: list[asyncio.Task[None]] = []
                for fault in plan:
                    if going and not fault.overlaps:
                        await asyncio.wait(going)
                        going = []
                    await asyncio.sleep(fault.gap_s)
                    going.append(faults.create_task(self._do(fault, supervisor)))
            await self._more_steps()
        finally:
            watching.cancel()
            for living in self._living.values():
                _signal(living.child.pid, signal.SIGCONT)

    async def close(self) -> None:
        for proxy in self._proxies.values():
            await proxy.close()
        self._tail.close()

    async def _watch(self) -> None:
        while True:
            for seen in self._tail.look():
                for injury in (*self.injuries, *self._probes):
                    injury.see(seen)
            async with self._changed:
                self._changed.notify_all()
            await asyncio.sleep(LOOK_S)

    async def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether it became true in time; looked at after every look at the ledger."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            return False
        return True

    async def _more_steps(self) -> None:
        wanted = {policy: version + MORE_STEPS for policy, version in read_versions(self._run).items()}

        def there() -> bool:
            versions = read_versions(self._run)
            return all(versions[policy] >= version for policy, version in wanted.items())

        if not await self._until(there, RECOVERY_S):
            raise RunFailed(f"no {MORE_STEPS} further steps within {RECOVERY_S:.0f} s after the last fault")

    async def _do(self, fault: Fault, supervisor: Supervisor) -> None:
        """One fault, from the choice of its victim until the run has recovered from it."""
        if not await self._until(lambda: bool(self._candidates(fault, supervisor)), VICTIM_S):
            raise RunFailed(f"fault {fault.number}: no {fault.component} to be hurt within {VICTIM_S:.0f} s")
        found = self._candidates(fault, supervisor)
        post = found[int(fault.pick * len(found))]
        with self._hurting([post]):
            injury = await self._injure(fault, post)
            with self._hurting([injury.post]):
                over = await self._until(lambda: injury.recovery_s is not None, RECOVERY_S)
        took = f"recovered in {injury.recovery_s:.1f} s" if over else f"NOT recovered within {RECOVERY_S:.0f} s"
        self._say(f"fault {fault.number}: {fault.kind} {fault.point} {injury.name}: {took}")

    def _candidates(self, fault: Fault, supervisor: Supervisor) -> list[str]:
        """Posts of that kind whose process works and is not hurt yet."""
        return sorted(
            post
            for post, living in self._living.items()
            if post.partition("-")[0] == fault.component
            and post not in self._hurt
            and living.child.code is None
            and supervisor.is_useful(post)
        )

    @contextlib.contextmanager
    def _hurting(self, posts: Sequence[str]) -> Iterator[None]:
        new = set(posts) - self._hurt
        self._hurt |= new
        try:
            yield
        finally:
            self._hurt -= new

    async def _injure(self, fault: Fault, post: str) -> Injury:
        if fault.kind is Kind.POINT:
            return await self._at_point(fault, post)
        if fault.kind is Kind.SECOND:
            return await self._second(fault, post)
        injury = self._injury(fault, post)
        self.injuries.append(injury)
        pid = self._living[post].child.pid
        if fault.kind is Kind.KILL:
            _signal(pid, signal.SIGKILL)
            return injury
        ways = self._ways(post)
        if fault.kind is Kind.STOP:
            _signal(pid, signal.SIGSTOP)
        for way in ways:
            way.cut, way.slow = fault.kind is Kind.CUT, fault.kind is Kind.SLOW
        await asyncio.sleep(fault.length_s)
        for way in ways:
            way.cut = way.slow = False
        _signal(pid, signal.SIGCONT)
        injury.healed_at = time.monotonic()
        if fault.component is Component.DATAFLOW:
            for each in self.injuries:
                each.see(Sighting(at=injury.healed_at, kind="dataflow_back"))
        return injury

    def _ways(self, post: str) -> list[Proxy]:
        """Its own; dataflow has those of all others."""
        return list(self._proxies.values()) if post == Component.DATAFLOW else [self._proxies[post]]

    async def _at_point(self, fault: Fault, post: str) -> Injury:
        """An order that the next process at that point obeys; whoever it is, is the victim."""
        taker = await self._taker(fault)
        if taker is None:
            injury = self._injury(fault, post)
            self.injuries.append(injury)
            _signal(self._living[post].child.pid, signal.SIGKILL)
            return injury
        pid, at = taker
        victim, name = self._pids[pid]
        living = self._living[victim]
        injury = Injury(fault=fault, post=victim, name=_known_as(victim, name), at=at)
        if living.started_at > at:  # the supervisor was quicker than this look
            injury.restarted(living.name, living.started_at)
        self.injuries.append(injury)
        return injury

    async def _taker(self, fault: Fault, *, only_stop: bool = False) -> tuple[int, float] | None:
        """pid and time of who obeyed an order for the fault's point; None: nobody came by in time."""
        taken = give_order(self._orders, fault.point, only_stop=only_stop)
        if not await self._until(lambda: _taken(taken) is not None, POINT_S):
            with contextlib.suppress(FileNotFoundError):
                (self._orders / fault.point).unlink()
            self.missed_points += 1
            self._say(f"fault {fault.number}: nobody came by {fault.point} within {POINT_S:.0f} s")
            return None
        said = _taken(taken)
        taken.unlink()
        return said

    async def _second(self, fault: Fault, post: str) -> Injury:
        """Stopped with a step that it has not committed; another takes over and gets ahead of it; then the first goes
        on and must be refused. It has dataflow for itself meanwhile: if its commit is taken, its history survives."""
        taker = await self._taker(fault, only_stop=True)
        post = post if taker is None else self._pids[taker[0]][0]
        living, policy = self._living[post], post.partition("-")[2]
        with self._hurting([post]):
            _signal(living.child.pid, signal.SIGSTOP)
            ahead = read_versions(self._run)[policy] + AHEAD
            probe = self._injury(fault, post)
            self._probes = [probe]
            async with second_trainer(self._run, policy) as child:
                probe.restarted("second", time.monotonic())
                await self._until(lambda: child.code is not None or self._is_ahead(probe, policy, ahead), RECOVERY_S)
                injury = self._injury(fault, post)
                self.injuries.append(injury)
                _signal(child.pid, signal.SIGSTOP)
                _signal(living.child.pid, signal.SIGCONT)
                if not await self._until(lambda: living.child.code is not None, REFUSED_S):
                    self.not_refused += 1
                    self._say(f"fault {fault.number}: {injury.name} goes on although another trainer took over")
                    await self._until(lambda: read_versions(self._run)[policy] >= ahead + MORE_STEPS, RECOVERY_S)
                    _signal(living.child.pid, signal.SIGKILL)
                    _signal(child.pid, signal.SIGKILL)
                _signal(child.pid, signal.SIGCONT)
                await self._until(lambda: injury.recovery_s is not None, RECOVERY_S)
        return injury

    def _is_ahead(self, probe: Injury, policy: str, version: int) -> bool:
        return probe.recovered_at is not None and read_versions(self._run)[policy] >= version

    def _injury(self, fault: Fault, post: str) -> Injury:
        name = _known_as(post, self._living[post].name)
        return Injury(fault=fault, post=post, name=name, at=time.monotonic())


def _known_as(post: str, name: str) -> str:
    """In the ledger: a trainer is known by its policy."""
    kind, _, policy = post.partition("-")
    return policy if kind == Component.TRAINER else name


def _taken(path: Path) -> tuple[int, float] | None:
    """Who took an order and when; None while nobody has, or is still writing."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return int(said["pid"]), float(said["at"])


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
