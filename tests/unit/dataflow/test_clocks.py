"""Leases live by dataflow's monotonic time alone: its wall clock may jump, other machines' clocks be wrong by hours."""

from __future__ import annotations

import asyncio
import itertools
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from astraflow.testing.virtual_clock import ManualClock, VirtualClock
from astraflow.testing.virtual_loop import run_virtual
from astraflow.types import Episode, Lease, Outcome
from tests.hostile.site import dump
from tests.unit.dataflow import rig as rigs
from tests.unit.dataflow.rig import Rig
from tests.unit.rollout import test_service as services
from tests.unit.rollout.doubles import lease

HOURS = 3600.0


class JumpingClock(ManualClock):
    """Its wall clock is somewhere else each time that it is read: hours ahead, hours back, years."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__(start)
        self._jumps = itertools.cycle([5 * HOURS, -9 * HOURS, 20_000 * HOURS, -1e9, 0.0])

    def wall(self) -> float:
        return 1.7e9 + next(self._jumps)


def a_life_of_leases(monkeypatch: pytest.MonkeyPatch, clock: type[ManualClock]) -> tuple[list[Any], dict[str, Any]]:
    """Renewed, expired, late, dead, retried, trained: every decision that time takes part in."""
    with monkeypatch.context() as patch:
        patch.setattr(rigs, "ManualClock", clock)
        with Rig() as rig:
            seen: list[Any] = []
            epoch = rig.resume()
            held = rig.leases(2)
            for _ in range(4):
                rig.advance(6)
                seen.append(rig.renew(held).lost)
            rig.submit(held[0], 1.0)
            rig.advance(11)
            seen.append((rig.renew(held[1:]).lost, rig.states("episodes"), rig.states("components")))
            (again,) = rig.leases(1, worker="v")
            rig.submit(again, 0.0, worker="v")
            seen.append(again.attempt)
            rig.go(rig.flow.status())
            rig.step(epoch)
            seen.append((rig.service.ledger.policies.versions, rig.go(rig.flow.status()).now_s))
            rig.balanced()
            return seen, dump(rig.service.ledger.store.connection)


def test_a_wall_clock_that_jumps_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = a_life_of_leases(monkeypatch, ManualClock)
    assert a_life_of_leases(monkeypatch, JumpingClock) == plain
    lost = plain[0][:4]
    assert lost == [(), (), (), ()], "renewed every 6 s, a lease of 10 s lives"
    assert plain[0][4][0] != (), "and 11 s of silence end it"


def test_a_lease_says_how_long_never_until_when() -> None:
    """A worker whose clock is wrong by hours reads durations only, and sends none that dataflow decides by."""
    numbers = {field.name for field in msgspec.structs.fields(Lease) if field.type is float}
    assert numbers == {"ttl_s", "time_limit_s", "version_choice"}, "the last is a share"
    with Rig() as rig:
        (given,) = rig.leases(1)
        assert (given.ttl_s, given.time_limit_s) == (10.0, 600.0)
        wild = Episode(task_key=given.task.key, outcome=Outcome.COMPLETED, wall_s=-1e9, score=1.0)
        rig.submit(given, episode=wild)
        rig.balanced()


def test_nothing_but_the_clock_reads_the_wall_clock(repo: Path) -> None:
    """One place: whoever wants the time of day takes it from a Clock, to show it to people."""
    reads = re.compile(r"\btime\.time\(|\bdatetime\.(now|utcnow|today)\(|\btime_ns\(|\blocaltime\(\)")
    found = {
        str(path.relative_to(repo))
        for path in (repo / "src").rglob("*.py")
        if reads.search(path.read_text(encoding="utf-8"))
    }
    # A chat template may ask for today's date: it is written into the prompt, nothing is decided by it.
    assert found == {"src/astraflow/clock.py", "src/astraflow/rollout/template.py"}


def test_a_worker_with_a_wrong_clock_plays_as_any_other() -> None:
    """Hours ahead or behind, and of another origin: the service only takes differences."""

    class Wrong(VirtualClock):
        off_s = 0.0

        def monotonic(self) -> float:
            return super().monotonic() + self.off_s

        def wall(self) -> float:
            return super().wall() - self.off_s

    def played(off_s: float) -> tuple[dict[str, Episode], list[Any]]:
        dataflow = services.ScriptedDataflow(*(lease(index=index) for index in range(3)))

        async def main() -> None:
            worker = services.service(dataflow, services.taking(3.0))
            clock = Wrong(asyncio.get_running_loop())
            clock.off_s = off_s
            worker._clock = clock
            await worker.run()

        run_virtual(main)
        return dataflow.submitted, [beat.report.doing for beat in dataflow.beats]

    right = played(0.0)
    assert len(right[0]) == 3
    assert played(7 * HOURS) == right
    assert played(-7 * HOURS) == right
