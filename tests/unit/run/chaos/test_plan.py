"""The plan of faults: decided by the seed, fair to every kind of component, half of it at named points."""

from __future__ import annotations

from collections import Counter

import pytest

from astraflow.errors import ConfigError
from astraflow.observe.points import POINTS
from astraflow.run.chaos.plan import BEFORE_COMMIT, LONGEST_CUT_S, STOP_S, Component, Kind, make_plan


def test_the_seed_decides_everything() -> None:
    assert make_plan(50, 7) == make_plan(50, 7)
    assert make_plan(50, 7) != make_plan(50, 8)


@pytest.mark.parametrize("seed", range(5))
def test_victims_are_drawn_per_kind_and_half_at_named_points(seed: int) -> None:
    plan = make_plan(99, seed)
    assert [fault.number for fault in plan] == list(range(99))
    assert Counter(fault.component for fault in plan) == dict.fromkeys(Component, 33)
    assert sum(fault.kind is Kind.POINT for fault in plan) == 50


def test_a_point_belongs_to_its_component_and_all_are_visited() -> None:
    plan = make_plan(100, 3)
    named = [fault for fault in plan if fault.kind is Kind.POINT]
    assert all(fault.point in POINTS[fault.component] for fault in named)
    assert all(fault.point == "" for fault in plan if fault.kind not in (Kind.POINT, Kind.SECOND))
    assert {fault.point for fault in named} == {point for points in POINTS.values() for point in points}


def test_lengths_are_as_documented() -> None:
    plan = make_plan(300, 1)
    assert {fault.kind for fault in plan} == set(Kind)
    assert {fault.length_s for fault in plan if fault.kind is Kind.STOP} == {STOP_S} == {15.0}
    assert all(1 <= f.length_s <= LONGEST_CUT_S for f in plan if f.kind in (Kind.CUT, Kind.SLOW))
    assert all(f.length_s == 0 for f in plan if f.kind in (Kind.KILL, Kind.POINT, Kind.SECOND))
    assert {f.component for f in plan if f.kind is Kind.SECOND} == {Component.TRAINER}
    assert not plan[0].overlaps


@pytest.mark.parametrize("seed", range(4))
def test_what_lasts_at_dataflow_is_left_alone(seed: int) -> None:
    """Whatever came meanwhile would be measured by the length of that fault."""
    plan = make_plan(300, seed)
    lasting = [f for f in plan if f.component is Component.DATAFLOW and f.kind in (Kind.STOP, Kind.CUT, Kind.SLOW)]
    assert len(lasting) > 10
    after = [plan[fault.number + 1] for fault in lasting if fault.number + 1 < len(plan)]
    assert not [fault for fault in (*lasting, *after) if fault.overlaps]
    assert 20 < sum(fault.overlaps for fault in plan) < 60


def test_who_is_replaced_holds_a_step_that_it_has_not_committed() -> None:
    """Anywhere else it might wait for a batch: then there is nothing that could be refused."""
    seconds = [fault for fault in make_plan(300, 1) if fault.kind is Kind.SECOND]
    assert seconds and {fault.point for fault in seconds} == {BEFORE_COMMIT}
    assert BEFORE_COMMIT in POINTS[Component.TRAINER]


def test_one_kill_at_least() -> None:
    with pytest.raises(ConfigError, match="at least 1, found 0"):
        make_plan(0, 1)
