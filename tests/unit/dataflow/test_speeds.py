"""What episodes took, measured by dataflow, and who gets what by it."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from astraflow.dataflow.settings import Limits, RunSpec
from astraflow.dataflow.speeds import MARGIN, OF_A_TASK, VERSIONS, Speeds
from astraflow.observe.waits import QUARANTINED, WaitReason
from astraflow.types import Lease
from astraflow.wire import messages as m
from tests.unit.dataflow.rig import Rig, make_spec, tasks
from tests.unit.dataflow.test_pool import report

LIMITS = Limits(dead_after_s=1e6, lease_ttl_s=1e6, time_limit_s=500.0)
FAST, SLOW = 10.0, 1.0
"""Tokens a second."""


def spec(**changes: Any) -> RunSpec:
    """Eight tasks again and again, each of one length."""
    return make_spec(
        **{"limits": LIMITS, "steps": 100, "group_size": 2, "groups_per_batch": 1, "max_staleness": 2,
           "source": tasks(8), **changes}
    )  # fmt: skip


def length_of(lease: Lease) -> int:
    """Task 7 is long."""
    return 100 if lease.task.key == "tasks-7" else 10


def play(rig: Rig, leases: tuple[Lease, ...], worker: str, speed: float) -> None:
    """One after the other."""
    for lease in leases:
        rig.advance(length_of(lease) / speed)
        spans = [rig.digest("p")] * (length_of(lease) // 2)
        rig.submit(lease, episode=rig.episode(lease, float(lease.index), spans=spans), worker=worker)


def learned(rig: Rig, *, epoch: int, speeds: dict[str, float], rounds: int = 8) -> Speeds:
    """Each worker plays a group in each round, and each round makes two versions."""
    for name in speeds:
        rig.lease(0, worker=name)
        report(rig, name)
    for _ in range(rounds):
        for name, speed in speeds.items():
            play(rig, rig.leases(2, worker=name), name, speed)
            rig.commit(rig.take(epoch))
    rig.advance(2.0)
    found = rig.service.ledger.speeds
    found.read(rig.clock.monotonic())
    return found


def test_paces_lengths_and_the_time_of_a_version_are_measured() -> None:
    with Rig(spec()) as rig:
        speeds = learned(rig, epoch=rig.resume(), speeds={"fast": FAST, "slow": SLOW})
        paces = speeds.paces("slow")
        assert paces is not None and paces.own == paces.all[1] == pytest.approx(1.5, rel=0.02)  # (10 + 20) / (2 · 10)
        assert paces.all[0] == pytest.approx(0.15, rel=0.02)
        assert speeds.tokens() == 10.0 == speeds.tokens("tasks-3") == speeds.tokens("never seen")
        assert speeds.tokens("tasks-7") == 100.0


@pytest.fixture
def rig() -> Any:
    with Rig(spec()) as made:
        yield made


def test_a_worker_without_history_counts_as_average_and_dies_out_of_the_count(rig: Rig) -> None:
    speeds = learned(rig, epoch=rig.resume(), speeds={"fast": FAST, "slow": SLOW})
    paces = speeds.paces("new")
    assert paces is not None and len(paces.all) == 3
    assert paces.own == pytest.approx((paces.all[0] + paces.all[2]) / 2)
    report(rig, "fast", doing=QUARANTINED)
    rig.advance(2.0)
    speeds.read(rig.clock.monotonic())
    assert speeds.paces("slow") is None  # it alone is left: it gets everything
    rig.go(rig.flow.operate(m.OperatorRequest(action="drain", worker="slow")))
    report(rig, "fast")
    rig.advance(2.0)
    speeds.read(rig.clock.monotonic())
    assert speeds.paces("fast") is None


def test_workers_that_are_alike_are_not_told_apart(rig: Rig) -> None:
    assert learned(rig, epoch=rig.resume(), speeds={"a": FAST, "b": FAST * 1.2}).paces("a") is None


def test_it_knows_the_same_after_a_restart(rig: Rig) -> None:
    before = learned(rig, epoch=rig.resume(), speeds={"fast": FAST, "slow": SLOW})
    rig.restart()
    after = rig.service.ledger.speeds
    now = float(rig.service.ledger.store.get("now"))
    after.read(now)
    assert after is not before
    assert after.paces("slow") == before.paces("slow")
    assert [after.tokens(f"tasks-{n}") for n in range(8)] == [before.tokens(f"tasks-{n}") for n in range(8)]


def test_only_the_last_episodes_of_a_task_count() -> None:
    with Rig(spec(source=tasks(1), groups_per_batch=8)) as rig:
        rig.resume()
        for length in (90, 10):
            for _ in range(OF_A_TASK // 2):
                for lease in rig.leases(2):
                    spans = [rig.digest("p")] * (length // 2)
                    rig.submit(lease, episode=rig.episode(lease, 0.5, spans=spans))
            rig.advance(1.5)
            rig.service.ledger.speeds.read(rig.clock.monotonic())
            assert rig.service.ledger.speeds.tokens("tasks-0") == length


def test_an_episode_that_was_given_up_for_its_length_is_known_to_be_long(rig: Rig) -> None:
    """Else the longest tasks, whose groups are cancelled before they end, would never be known."""
    speeds = learned(rig, epoch=rig.resume(), speeds={"fast": FAST})
    (lease,) = rig.leases(1, worker="fast")
    rig.advance(LIMITS.time_limit_s + LIMITS.grace_s + 1)  # three times: then it is given up
    for _ in range(LIMITS.max_attempts - 1):
        rig.leases(1, worker="fast")
        rig.advance(LIMITS.time_limit_s + LIMITS.grace_s + 1)
    speeds.read(rig.clock.monotonic())
    assert rig.db.one("SELECT kind FROM episodes WHERE group_id = ? AND idx = ?", lease.group, lease.index) == (
        "timeout",
    )
    assert speeds.tokens(lease.task.key) > 10 * speeds.tokens()


def test_the_horizon_is_the_bound_in_versions_and_grows_while_none_is_made(rig: Rig) -> None:
    speeds = rig.service.ledger.speeds
    assert speeds.horizon_s(0.0) == inf
    learned(rig, epoch=rig.resume(), speeds={"fast": FAST}, rounds=10)
    now = float(rig.service.ledger.store.get("now"))
    version_s = speeds.horizon_s(now) / (2 - MARGIN)
    assert 1.0 < version_s < 20.0
    assert speeds.horizon_s(now + 1000.0) == pytest.approx(1000.0 * (2 - MARGIN), rel=0.1)


def test_on_policy_nothing_can_be_late() -> None:
    with Rig(spec(max_staleness=0)) as rig:
        speeds = learned(rig, epoch=rig.resume(), speeds={"fast": FAST, "slow": SLOW})
        assert speeds.horizon_s(rig.clock.monotonic()) == inf


def hurried(rig: Rig, *, fast: float, slow: float, version_s: float) -> None:
    """Both are known; then the fast one alone makes versions, each of which takes so long."""
    epoch = rig.resume()
    learned(rig, epoch=epoch, speeds={"fast": fast, "slow": slow})
    for _ in range(VERSIONS):
        play(rig, rig.leases(2, worker="fast"), "fast", fast)
        rig.advance(version_s)
        rig.commit(rig.take(epoch))
    rig.service.ledger.speeds.read(rig.clock.monotonic())


def hand_back(rig: Rig, leases: tuple[Lease, ...]) -> None:
    rig.go(rig.flow.hand_back(m.HandBackRequest(worker="fast", held=tuple(each.id for each in leases))))


def test_the_slow_worker_gets_what_it_plays_before_it_is_stale_and_the_fast_one_the_long_one_first(rig: Rig) -> None:
    """10 tokens take the fast one 0.2 s and the slow one 2 s, 100 tokens 2 s and 20 s; 6 s are left."""
    hurried(rig, fast=50.0, slow=5.0, version_s=3.0)
    groups = rig.leases(6, worker="fast")
    while all(length_of(each) == 10 for each in groups):
        play(rig, groups, "fast", 1000.0)
        for _ in range(3):
            rig.commit(rig.take(1))
        groups = rig.leases(6, worker="fast")
    rig.advance(3.0)
    hand_back(rig, groups)
    assert 5.0 < rig.service.ledger.speeds.horizon_s(float(rig.db.get("now"))) < 15.0
    assert [length_of(each) for each in rig.lease(6, worker="slow").leases] == [10] * 4
    assert [length_of(each) for each in rig.lease(6, worker="fast").leases] == [100] * 2


def test_a_worker_too_slow_for_anything_says_so_and_gets_what_has_waited_too_long(rig: Rig) -> None:
    hurried(rig, fast=FAST, slow=SLOW, version_s=1.0)
    hand_back(rig, rig.leases(2, worker="fast"))
    reply = rig.lease(2, worker="slow")
    assert not reply.leases and reply.reason == WaitReason.TOO_SLOW
    rig.advance(LIMITS.time_limit_s + 1)
    assert len(rig.leases(2, worker="slow")) == 2


def test_without_anybody_faster_nobody_is_too_slow(rig: Rig) -> None:
    hurried(rig, fast=FAST, slow=SLOW, version_s=1.0)
    hand_back(rig, rig.leases(2, worker="fast"))
    bye = m.ReportRequest(
        component="rollout", name="fast", incarnation="fast", report=m.ComponentReport(), leaving=True
    )
    rig.go(rig.flow.report(bye))
    rig.advance(2.0)
    assert len(rig.leases(4, worker="slow")) == 4


def test_an_episode_that_took_no_time_by_the_clock_divides_nothing_by_zero(rig: Rig) -> None:
    (lease, _) = rig.leases(2, worker="w")
    rig.submit(lease, worker="w")
    rig.advance(LIMITS.time_limit_s + LIMITS.grace_s + 1)  # its sibling is given up for its length
    speeds = rig.service.ledger.speeds
    speeds.read(rig.clock.monotonic() + 2.0)
    assert speeds.paces("w") is None
    for _ in range(LIMITS.max_attempts - 1):
        rig.leases(1, worker="w")
        rig.advance(LIMITS.time_limit_s + LIMITS.grace_s + 1)
    speeds.read(rig.clock.monotonic() + 4.0)
    assert 0 < speeds.tokens() < float("inf")
