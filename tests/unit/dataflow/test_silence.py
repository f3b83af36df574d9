"""A dataflow that did not look for a while knows nothing of the others' silence: it was itself that was away."""

from __future__ import annotations

from pathlib import Path

import pytest

from astraflow.dataflow.settings import Limits
from astraflow.dataflow.sweeps import deaf_after_s
from astraflow.errors import StorageFull
from astraflow.wire import messages as m
from tests.unit.dataflow.rig import Rig, make_spec

HEARTBEAT_S, DEAD_AFTER_S = Limits().heartbeat_s, Limits().dead_after_s


def state(rig: Rig, name: str) -> str:
    (found,) = rig.db.one("SELECT state FROM components WHERE name = ?", name)
    return str(found)


def held_by(rig: Rig, worker: str) -> int:
    return int(rig.db.number("SELECT COUNT(*) FROM episodes WHERE state = 'leased' AND worker = ?", worker))


def leaving(worker: str) -> m.ReportRequest:
    report = m.ComponentReport()
    return m.ReportRequest(component="rollout", name=worker, incarnation=worker, report=report, leaving=True)


@pytest.mark.parametrize("seconds", [15.0, 3600.0])
def test_after_a_pause_nobody_is_dead_and_no_lease_has_run_out(seconds: float) -> None:
    with Rig() as rig:
        held = rig.leases(2)
        rig.resume()
        rig.pause(seconds)
        assert (state(rig, "w"), state(rig, "t-p")) == ("alive", "alive")
        assert rig.renew(held).lost == ()
        assert rig.db.all("SELECT json_extract(data, '$.silent_s') FROM events WHERE kind = 'heard_again'") == [
            (seconds,)
        ]
        rig.balanced()


def test_who_really_died_is_noticed_within_a_heartbeat_and_its_term_after_the_pause() -> None:
    with Rig() as rig:
        held = rig.leases(1, worker="lives")
        rig.leases(1, worker="died")
        rig.pause(15)
        for _ in range(int(HEARTBEAT_S + DEAD_AFTER_S)):
            assert rig.renew(held, worker="lives").lost == ()
            rig.pause(1)
        assert (state(rig, "lives"), state(rig, "died")) == ("alive", "dead")
        assert (held_by(rig, "lives"), held_by(rig, "died")) == (1, 0)
        rig.balanced()


def test_whoever_is_first_after_the_pause_the_others_are_heard_too() -> None:
    """A renewal, a successor or a goodbye may come before dataflow's own tick."""
    with Rig() as rig:
        held = {worker: rig.leases(1, worker=worker) for worker in ("a", "b", "c", "d")}
        rig.clock.advance(15)
        rig.renew(held["a"], worker="a")
        rig.go(rig.flow.hello(m.HelloRequest(component="rollout", name="b", incarnation="b again")))
        assert held_by(rig, "b") == 0, "its predecessor's leases are worth nothing, pause or not"
        rig.clock.advance(15)
        rig.go(rig.flow.report(leaving("c")))
        assert held_by(rig, "c") == 0, "it said goodbye"
        rig.pause(0)
        assert [state(rig, name) for name in "abcd"] == ["alive", "alive", "left", "alive"]
        assert (held_by(rig, "a"), held_by(rig, "d")) == (1, 1)
        assert rig.renew(held["d"], worker="d").lost == ()
        rig.balanced()


def test_ticks_that_are_merely_late_do_not_keep_the_dead_alive() -> None:
    with Rig() as rig:
        rig.leases(1)
        for _ in range(2):
            rig.pause(deaf_after_s(Limits()))
        assert (state(rig, "w"), held_by(rig, "w")) == ("dead", 0)


def test_the_shortest_terms_that_are_allowed_end_too() -> None:
    limits = Limits(lease_ttl_s=4, dead_after_s=4)
    with Rig(make_spec(limits=limits)) as rig:
        rig.leases(1)
        for _ in range(4):
            rig.pause(min(1.0, limits.heartbeat_s / 2))  # as the service ticks
        assert (state(rig, "w"), held_by(rig, "w")) == ("dead", 0)
        assert rig.db.number("SELECT COUNT(*) FROM events WHERE kind = 'heard_again'") == 0


def test_no_gap_at_any_phase_of_a_heartbeat_kills_who_speaks() -> None:
    """The heartbeats of the gap are read after the tick that follows it."""
    for gap in (0.5, 4.9, 5.0, 5.1, 7.9, 8.0, 9.9, 10.0, 30.0):
        for phase in (0.0, 1.0, 1.9):
            with Rig() as rig:
                held = rig.leases(1)
                for _ in range(3):
                    rig.pause(phase)
                    rig.pause(gap)
                    assert rig.renew(held).lost == (), f"gap {gap}, {phase} s after a heartbeat"
                assert rig.db.number("SELECT COUNT(*) FROM events WHERE kind IN ('dead', 'failed')") == 0


def test_new_terms_that_did_not_get_to_the_disk_are_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: float) -> None:
        raise StorageFull("no space")

    with Rig() as rig:
        held = rig.leases(1)
        with monkeypatch.context() as patch:
            patch.setattr(rig.service, "_prune", full)
            with pytest.raises(StorageFull):
                rig.pause(15)
        rig.pause(1)
        assert (state(rig, "w"), rig.renew(held).lost) == ("alive", ())
        assert rig.db.all("SELECT json_extract(data, '$.silent_s') FROM events WHERE kind = 'heard_again'") == [(16.0,)]


# ── the watchdog's clock ──


def starving(action: str = "stop") -> Rig:
    """Two groups kept of the four of a batch; its only worker is gone for 50 s of the 60 that are allowed."""
    limits = Limits(starved_after_s=60, when_starved=action)  # type: ignore[arg-type]
    rig = Rig(make_spec(limits=limits, groups_per_batch=4))
    rig.resume()
    rig.play_groups(2)
    rig.go(rig.flow.report(leaving("w")))
    rig.advance(50)
    return rig


@pytest.mark.parametrize("action", ["stop", "smaller_batch", "wait"])
@pytest.mark.parametrize("seconds", [11.0, 3600.0])
def test_a_pause_is_no_time_without_a_worker(action: str, seconds: float) -> None:
    """Nobody could join while dataflow was stopped: the full limit begins anew, and then it is as ever."""
    with starving(action) as rig:
        rig.pause(seconds)
        rig.advance(59)
        assert rig.service.ledger.state == "running"
        assert rig.db.number("SELECT COUNT(*) FROM events WHERE kind = 'starved'") == 0
        rig.advance(1)
        assert (rig.service.ledger.state == "failed") == (action == "stop")
        assert action == "stop" or rig.db.number("SELECT COUNT(*) FROM events WHERE kind = 'starved'") == 1


def test_whoever_is_first_after_the_pause_the_watchdog_does_not_act_at_once() -> None:
    """A goodbye sweeps before the tick that looks: the gap is found by then, and by the watchdog too."""
    with starving() as rig:
        rig.leases(1, worker="late")
        rig.advance(1)
        rig.clock.advance(3600)
        rig.go(rig.flow.report(leaving("late")))
        rig.pause(0)
        assert rig.service.ledger.state == "running"
        rig.advance(59)
        assert rig.service.ledger.state == "running"
        rig.advance(2)
        assert rig.service.ledger.state == "failed"


def test_a_gap_that_did_not_get_to_the_disk_is_the_watchdogs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: float) -> None:
        raise StorageFull("no space")

    with starving() as rig:
        with monkeypatch.context() as patch:
            patch.setattr(rig.service, "_prune", full)
            for _ in range(30):
                with pytest.raises(StorageFull):
                    rig.pause(1)
        rig.pause(1)
        assert rig.service.ledger.state == "running"
        rig.advance(60)
        assert rig.service.ledger.state == "failed"


def test_what_was_said_before_a_restart_is_no_news(tmp_path: Path) -> None:
    """Status shows what a process does now, or that nobody knows."""
    busy = m.ComponentReport(doing="plays", why="as always", metrics={"token/sampled": 5.0}, error="an old one")

    def shown(rig: Rig) -> m.ComponentReport:
        status = rig.go(rig.flow.status())
        return next(each.report for each in status.components if each.component == "rollout")

    with Rig(make_spec(), folder=tmp_path) as rig:
        rig.advance(1)
        rig.go(rig.flow.renew(m.RenewRequest(worker="w", incarnation="w", report=busy)))
        assert shown(rig) == busy
        rig.restart()
        found = shown(rig)
        assert (found.doing, found.why, found.error) == ("unheard", "since dataflow was started or stood still", None)
        assert found.metrics == busy.metrics, "what it has done stays done"
        rig.advance(1)
        rig.go(rig.flow.renew(m.RenewRequest(worker="w", incarnation="w", report=busy)))
        assert shown(rig) == busy
