"""The pool as dataflow sees it: who is where, how fast, how stale, why not; and how many workers there should be."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from astraflow.dataflow.autoscale import GROW, HOLD, SHRINK, Scaling
from astraflow.dataflow.meter import Meter
from astraflow.dataflow.settings import Limits, RunSpec
from astraflow.errors import BadRequest
from astraflow.observe.pool import pool_lines, target_line
from astraflow.wire import messages as m
from tests.unit.dataflow.rig import Rig, make_spec

SCALING = Scaling(least=1, most=8, cool_down_s=10.0, window_s=60.0)


def spec(**changes: Any) -> RunSpec:
    import dataclasses

    limits = Limits(dead_after_s=30.0, lease_ttl_s=3600.0)
    return dataclasses.replace(make_spec(limits=limits, **changes), scaling=SCALING)


def report(rig: Rig, worker: str = "w", **fields: Any) -> m.RenewReply:
    """A heartbeat; without other words it serves the newest version."""
    said = m.ComponentReport(**{"doing": "playing 2 episodes", "versions": {"p": rig.digest("p")[0]}, **fields})
    held = [f"{g}/{i}/{a}" for g, i, a in rig.db.all(
        "SELECT group_id, idx, attempt FROM episodes WHERE worker = ? AND state = 'leased'", worker
    )]  # fmt: skip
    request = m.RenewRequest(worker=worker, incarnation=worker, held=tuple(held), report=said)
    return rig.go(rig.flow.renew(request))


def pool(rig: Rig) -> m.PoolReply:
    return rig.go(rig.flow.pool())


def worker(rig: Rig, name: str = "w") -> m.PoolWorker:
    return next(each for each in pool(rig).workers if each.name == name)


# ── one line a worker ──


def test_a_worker_that_serves() -> None:
    with Rig(spec()) as rig:
        rig.leases(2)
        report(rig, region="eu", relay="http://10.0.0.1:7000", metrics={"weights/bytes/relay": 5.0, "x/y": 1.0})
        found = worker(rig)
        assert (found.state, found.region, found.relay, found.held) == ("alive", "eu", "http://10.0.0.1:7000", 2)
        assert (found.versions, found.lag, found.reason) == ({"p": 0}, {"p": 0}, "")
        assert found.metrics == {"weights/bytes/relay": 5.0}
        assert pool(rig).target.workers == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"versions": {}}, "holds no version of p yet"),
        ({"doing": "weights", "why": "p version 3"}, "waits for weights: p version 3"),
        ({"doing": "storage"}, "waits for storage"),
        ({"error": "quarantined: wrong base"}, "quarantined: wrong base"),
        ({"doing": "starting"}, "starting"),
        ({"doing": "lease", "why": "no_room"}, ""),
    ],
)
def test_why_a_worker_does_not_serve(fields: dict[str, Any], reason: str) -> None:
    with Rig(spec()) as rig:
        rig.lease(0)
        report(rig, **fields)
        assert worker(rig).reason == reason
        assert pool(rig).target.workers == (0 if reason else 1)


def test_who_is_gone_told_to_leave_or_serves_something_else() -> None:
    with Rig(spec()) as rig:
        for name in ("dead", "told", "other"):
            rig.lease(0, worker=name, policies=["q"] if name == "other" else None)
            report(rig, name, versions={"q": 0} if name == "other" else {"p": 0})
        rig.go(rig.flow.operate(m.OperatorRequest(action="drain", worker="told")))
        rig.advance(29)
        for name in ("told", "other"):
            report(rig, name, versions={"q": 0} if name == "other" else {"p": 0})
        rig.advance(2)
        assert worker(rig, "dead").reason == "dead"
        assert worker(rig, "dead").heard_s == pytest.approx(31)
        assert worker(rig, "told").reason == "it was told to leave"
        assert "does not serve p" in worker(rig, "other").reason
        assert pool(rig).target.workers == 0


def test_weights_that_are_too_old_are_named_and_no_reason_not_to_serve() -> None:
    with Rig(spec(max_staleness=1)) as rig:
        epoch = rig.resume()
        rig.lease(0)
        for lag in range(3):
            report(rig, versions={"p": 0})
            found = worker(rig)
            assert found.lag == {"p": lag}
            assert ("are 2 versions old" in found.stale) is (lag == 2)
            assert found.reason == "" and pool(rig).target.workers == 1
            rig.step(epoch)


def test_who_waits_for_weights_serves_while_it_holds_leases() -> None:
    with Rig(spec()) as rig:
        rig.lease(0)
        report(rig, doing="weights", why="p version 3")
        assert worker(rig).reason == "waits for weights: p version 3"
        rig.leases(1)
        report(rig, doing="weights", why="p version 3")
        assert worker(rig).reason == "" and pool(rig).target.workers == 1


def test_rates_are_differences_of_counters_over_the_last_minute() -> None:
    with Rig(spec()) as rig:
        rig.lease(0)
        assert worker(rig).tokens_per_s is None
        for second in range(0, 20, 2):
            report(rig, metrics={"token/sampled": 100.0 * second})
            rig.advance(2)
        assert worker(rig).tokens_per_s == pytest.approx(100.0)
        for lease in rig.leases(2):
            rig.submit(lease, float(lease.index))
        rig.advance(2)
        assert worker(rig).episodes_per_s == pytest.approx(2 / 20)
        for _ in range(40):
            report(rig, metrics={"token/sampled": 1800.0})
            rig.advance(2)
        assert worker(rig).tokens_per_s == 0.0 == worker(rig).episodes_per_s


def test_staleness_of_what_each_worker_sent() -> None:
    """Two groups played by version 0; one is trained at once, the other a step later."""
    with Rig(spec(groups_per_batch=1, max_staleness=2)) as rig:
        epoch = rig.resume()
        rig.advance(2)
        for name in ("a", "b"):
            rig.lease(0, worker=name)
            report(rig, name)
        first, second = [rig.leases(2, worker=name) for name in ("a", "b")]
        for leases, name in ((first, "a"), (second, "b")):
            for lease in leases:
                rig.submit(lease, float(lease.index), worker=name)
        rig.commit(rig.take(epoch))
        rig.commit(rig.take(epoch))
        rig.advance(2)
        assert worker(rig, "a").staleness == {"0": 2}
        assert worker(rig, "b").staleness == {"1": 2}


# ── how many ──


def beat(
    rig: Rig, seconds: float, *, waited: float, active: float, names: tuple[str, ...] = ("w",), **fields: Any
) -> None:
    """Heartbeats in which the trainer waits and the workers play for these shares of the time."""
    now = rig.clock.monotonic()
    total = getattr(rig, "waited", 0.0)
    busy = getattr(rig, "busy", 0.0)
    while rig.clock.monotonic() < now + seconds:
        rig.advance(2)
        total, busy = total + 2 * waited, busy + 2 * active
        for name in names:
            report(rig, name, metrics={"playing/active_s": busy}, **fields)
        said = m.ComponentReport(doing="steps", metrics={"wait_s/batch": total})
        rig.go(rig.flow.report(m.ReportRequest(component="trainer", name="t-p", incarnation="t", report=said)))
    rig.waited, rig.busy = total, busy  # type: ignore[attr-defined]


def test_nobody_there_asks_for_the_least() -> None:
    with Rig(spec()) as rig:
        found = pool(rig).target
        assert (found.action, found.target, found.workers) == (GROW, 1, 0)


def test_a_starving_trainer_asks_for_more_and_a_change_begins_the_measurement_anew() -> None:
    with Rig(spec()) as rig:
        rig.resume()
        rig.lease(0)
        beat(rig, 8, waited=0.4, active=1.0)
        assert pool(rig).target.action == HOLD and "of 10 s" in pool(rig).target.reason
        beat(rig, 20, waited=0.4, active=1.0)
        found = pool(rig).target
        assert (found.action, found.workers, found.target) == (GROW, 1, 2)
        assert found.wait == pytest.approx(0.4, abs=0.03)
        rig.lease(0, worker="v")
        beat(rig, 6, waited=0.0, active=1.0, names=("w", "v"))
        assert pool(rig).target.action == HOLD and pool(rig).target.workers == 2


def test_a_worker_that_flaps_around_the_staleness_bound_is_measured_all_the_time() -> None:
    with Rig(spec(max_staleness=1)) as rig:
        epoch = rig.resume()
        rig.lease(0)
        beat(rig, 2, waited=0.4, active=1.0)
        rig.step(epoch)
        rig.step(epoch)
        for versions in ({"p": 0}, {"p": 2}, {"p": 0}, {"p": 2}, {"p": 0}):
            beat(rig, 4, waited=0.4, active=1.0, versions=versions)
        found = pool(rig).target
        assert worker(rig).stale and (found.action, found.workers, found.target) == (GROW, 1, 2)


def test_while_nothing_is_measured_it_says_why() -> None:
    with Rig(spec()) as rig:
        rig.resume()
        rig.lease(0)
        beat(rig, 20, waited=0.0, active=1.0)
        rig.lease(0, worker="v")
        beat(rig, 2, waited=0.0, active=1.0, names=("w", "v"))
        found = pool(rig).target
        assert (found.action, found.wait) == (HOLD, None)
        assert found.reason == "not measured yet: the same workers must have served for 10 s"


def test_a_wait_that_is_going_on_counts() -> None:
    """Its counter grows only when it ends: a trainer that gets nothing at all would look busy."""
    with Rig(spec()) as rig:
        rig.resume()
        rig.lease(0)
        for second in range(0, 30, 2):
            rig.advance(2)
            report(rig)
            said = m.ComponentReport(doing="batch", since_s=float(second))
            rig.go(rig.flow.report(m.ReportRequest(component="trainer", name="t-p", incarnation="t", report=said)))
        found = pool(rig).target
        assert found.wait == pytest.approx(1.0, abs=0.02) and found.action == GROW


def test_idle_workers_are_taken_away_and_dropped_groups_count_as_used() -> None:
    """Half of the groups have no signal: what the trainer uses up is all that is played, not the half that trains."""
    from astraflow.algorithms.keep import DropZeroVariance

    with Rig(spec(steps=1000, groups_per_batch=1, keep=[DropZeroVariance()])) as rig:
        epoch = rig.resume()
        for name in ("w", "v", "u", "s"):
            rig.lease(0, worker=name)
        for _ in range(10):
            beat(rig, 2, waited=0.0, active=0.25, names=("w", "v", "u", "s"))
            for number, lease in enumerate(rig.leases(4)):
                rig.submit(lease, float(lease.index) if number < 2 else 1.0)
            rig.commit(rig.take(epoch))
        beat(rig, 2, waited=0.0, active=0.25, names=("w", "v", "u", "s"))
        found = pool(rig).target
        assert found.wait == 0.0
        assert found.produced_per_s == pytest.approx(4 * found.consumed_per_s, rel=0.1)
        assert (found.action, found.workers, found.target) == (SHRINK, 4, 2)  # ⌈1.1 · 4 / 4⌉


def test_no_trainer_no_decision() -> None:
    with Rig(spec()) as rig:
        rig.lease(0)
        for _ in range(20):
            rig.advance(2)
            report(rig)
        assert (pool(rig).target.action, pool(rig).target.wait) == (HOLD, None)
        assert pool(rig).target.reason == "no trainer is there to be measured"


def test_a_meter_without_readings_knows_nothing() -> None:
    meter = Meter(60.0)
    assert meter.window() is None and meter.wait() is None and meter.active() is None
    assert meter.tokens_per_s(("w", "1")) is None
    assert meter.due(0.0)


# ── relays are announced by dataflow ──


def test_relays_of_the_own_region_come_first_and_the_dead_are_not_named() -> None:
    with Rig(spec()) as rig:
        for name, region, port in (("a", "us", 1), ("b", "eu", 2), ("c", "eu", 0)):
            rig.lease(0, worker=name)
            report(rig, name, region=region, relay=f"http://10.0.0.1:{port}" if port else "")
        reply = report(rig, "c", region="eu")
        assert [(each.worker, each.region, each.incarnation) for each in reply.relays] == [
            ("b", "eu", "b"),
            ("a", "us", "a"),
        ]
        assert [each.worker for each in report(rig, "b", region="eu", relay="http://10.0.0.1:2").relays] == ["a"]
        report(rig, "b", region="eu", relay="http://10.0.0.1:9")
        assert next(each.url for each in report(rig, "c", region="eu").relays) == "http://10.0.0.1:9"
        report(rig, "b", region="eu")
        assert [each.worker for each in report(rig, "c", region="eu").relays] == ["a"]
        rig.advance(29)
        report(rig, "c", region="eu")
        rig.advance(2)
        assert report(rig, "c", region="eu").relays == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"region": "../x"},
        {"region": "a b"},
        {"relay": "ftp://x:1"},
        {"relay": "http://x"},
        {"relay": "http://x:1/path"},
        {"relay": "http://user@x:1"},
        {"relay": "http://x:1?y"},
        {"relay": "http://x:1\r\nHost: y"},
    ],
)
def test_f94_places_that_strangers_name_are_checked(wrong: dict[str, str]) -> None:
    with Rig(spec()) as rig:
        rig.lease(0)
        with pytest.raises(BadRequest, match="ComponentReport"):
            report(rig, **wrong)


# ── for people ──


def test_the_table() -> None:
    busy = m.PoolWorker(
        name="w1", state="alive", region="eu", relay="http://x:1", versions={"p": 7}, lag={"p": 2}, tokens_per_s=1234.5,
        episodes_per_s=0.25, held=3, staleness={"10": 1, "2": 5}, metrics={"relay/dropped": 1.0},
    )  # fmt: skip
    gone = msgspec.structs.replace(busy, name="w0", state="dead", heard_s=30.0, reason="dead")
    old = msgspec.structs.replace(gone, name="old", heard_s=700.0)
    target = m.PoolTarget(workers=1, target=2, action="grow", reason="the trainer waits 40% of its time")
    lines = pool_lines(m.PoolReply(run="r", state="running", workers=(gone, busy, old), target=target))
    assert lines[0] == "run r: running" and lines[1].split()[:3] == ["worker", "region", "versions"]
    row = "w1 eu (relay) p v7 2 1234 0.25 3 2:5 10:1 dropped 1 relays that served wrong bytes"
    assert " ".join(lines[2].split()) == row
    assert "does not serve: dead" in lines[3]
    assert lines[4] == "1 workers serve, 2 should (grow: the trainer waits 40% of its time)"
    assert len(lines) == 5
    stale = msgspec.structs.replace(busy, stale="its weights of p are 2 versions old", metrics={})
    lines = pool_lines(m.PoolReply(run="r", state="running", workers=(stale,), target=target))
    assert "2:5 10:1" in lines[2] and lines[2].endswith("  its weights of p are 2 versions old")
    took = {
        "weights/bytes": 9e9, "weights/bytes/origin": 1e6, "weights/bytes/relay": 2e5, "weights/download_s": 0.4,
        "weights/decode_s": 0.1, "weights/load_s": 0.25, "weights/attest_s": 0.05, "weights/pause_s": 0.003,
        "weights/refused": 2.0,
    }  # fmt: skip
    lines = pool_lines(m.PoolReply(run="r", state="running", target=target, workers=(
        msgspec.structs.replace(busy, metrics=took),)))  # fmt: skip
    assert lines[2].endswith(
        "refused what its engine held 2 times; weights: 1.2 MB in 0.4 s, decoded 0.1 s, applied 0.25 s, "
        "proved 0.05 s, paused 3 ms"
    )
    empty = m.PoolReply(run="r", state="running", workers=(), target=msgspec.structs.replace(target, workers=2))
    assert pool_lines(empty)[1] == "no worker is there"
    assert "as they should" in target_line(empty.target)
