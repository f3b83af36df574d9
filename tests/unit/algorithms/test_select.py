from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.algorithms.base import ReadyGroup
from astraflow.algorithms.select import EarliestDeadline, Fifo, replay_count
from astraflow.errors import ConfigError


def ready(*versions: int | None, first: int = 0) -> list[ReadyGroup]:
    return [ReadyGroup(group=first + n, min_version=v, arrival=n) for n, v in enumerate(versions)]


def pick(select, groups, need, oldest_open=None):
    return select.pick(groups, need=need, oldest_open=oldest_open)


def test_f62_oldest_version_first_ties_by_arrival():
    groups = ready(5, 5, 4)
    assert pick(EarliestDeadline(), groups, 3) == [2, 0, 1]
    assert pick(Fifo(), groups, 3) == [0, 1, 2]


def test_f62_a_group_without_a_version_takes_its_turn_and_is_not_most_urgent():
    assert pick(EarliestDeadline(), ready(5, 5, 4, None), 4) == [2, 0, 1, 3]
    assert pick(EarliestDeadline(), ready(3, None, 4, 5), 4) == [0, 1, 2, 3]
    assert pick(EarliestDeadline(), ready(None, None), 2) == [0, 1]


def test_f59_what_was_not_picked_stays_for_the_next():
    groups = ready(*range(10))
    assert pick(EarliestDeadline(), groups, 8) == list(range(8))
    assert pick(EarliestDeadline(), groups[8:], 2) == [8, 9]


@pytest.mark.parametrize("select", [EarliestDeadline(), Fifo()])
def test_too_few_is_nothing(select):
    assert pick(select, ready(1, 2), 3) == []
    assert pick(select, [], 1) == []


@pytest.mark.parametrize("select", [EarliestDeadline(window=4), Fifo(window=4)])
def test_at_most_window_minus_one_younger_groups_overtake_a_straggler(select):
    """Group 10 is still open: 11, 12, 13 may overtake it, 14 waits for it, and older ones always go."""
    groups = ready(0, 0, 0, 0, first=11)
    assert pick(select, groups, 3, oldest_open=10) == [11, 12, 13]
    assert pick(select, groups, 4, oldest_open=10) == []
    assert pick(select, groups, 4, oldest_open=11) == [11, 12, 13, 14]
    assert pick(select, groups, 4) == [11, 12, 13, 14]
    assert pick(select, ready(0, 0, first=8), 2, oldest_open=10) == [8, 9]


def test_a_straggler_that_arrives_goes_first():
    late = [*ready(4, 4, 4, first=11), ReadyGroup(group=10, min_version=2, arrival=9)]
    assert pick(EarliestDeadline(window=4), late, 2, oldest_open=14) == [10, 11]


@pytest.mark.parametrize("select", [EarliestDeadline, Fifo])
def test_a_window_of_nothing_is_refused(select):
    with pytest.raises(ConfigError, match="window must be at least 1 group"):
        select(window=0)


@given(versions=st.lists(st.none() | st.integers(0, 5), max_size=12), need=st.integers(1, 12), data=st.data())
@pytest.mark.parametrize("select", [EarliestDeadline(), EarliestDeadline(window=5), Fifo(), Fifo(window=3)])
def test_the_order_in_which_the_groups_are_listed_does_not_matter(select, versions, need, data):
    groups = ready(*versions)
    mixed = data.draw(st.permutations(groups))
    assert pick(select, mixed, need, 2) == pick(select, groups, need, 2)


def test_f63_replay_counts_are_exact():
    assert replay_count(100, 0.29) == 29
    assert replay_count(10, 0.29) == 3
    assert replay_count(10, 0.15) == 2, "0.15 is a decimal, not the float a hair below it"
    assert replay_count(4, 0.5) == 2
    assert replay_count(5, 0.5) == 3, "half up"
    assert replay_count(10, Fraction(1, 3)) == 3
    assert replay_count(10, "0.25") == 3
    assert replay_count(8, 0) == 0
    for wrong in (-0.1, 1, 1.5):
        with pytest.raises(ConfigError, match=r"must be in \[0, 1\)"):
            replay_count(8, wrong)
