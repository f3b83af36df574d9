"""PODS against brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from time import perf_counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.algorithms.credit import GroupMean, Whitened
from astraflow.algorithms.keep_subset import MaxVariance, OfSubset, max_variance
from astraflow.errors import ConfigError
from astraflow.testing.check_algorithm import check_algorithm, group_summary
from tests.unit.algorithms.test_keep import summary
from tests.unit.dataflow_pure.build import scored, settled, table


def best(values, count):
    """The largest variance of any ``count`` of the values."""
    return max(np.var(np.array(each)) for each in combinations(values, count))


@settings(deadline=None)  # brute force takes what it takes
@given(
    values=st.lists(st.floats(-100, 100, allow_nan=False) | st.sampled_from([0.0, 1.0, 0.1]), min_size=2, max_size=9),
    count=st.integers(2, 8),
)
def test_no_other_choice_has_more_variance(values, count):
    chosen = max_variance(np.array(values), count)
    assert len(chosen) == len(set(chosen)) == min(count, len(values))
    assert chosen == sorted(chosen)
    if len(values) > count:
        np.testing.assert_allclose(np.var(np.array(values)[chosen]), best(values, count), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("base", [0.0, 1e8, -1e8])
def test_f40_far_from_zero_too(base):
    values = base + np.array([0.0, 1.0, 2.0, 3.0, 10.0, 11.0])
    assert sorted((values[max_variance(values, 4)] - base).tolist()) == [0, 1, 10, 11]
    assert sorted((values[max_variance(values, 3)] - base).tolist()) == [0, 10, 11]


def test_absurd_rewards_are_ranked_all_the_same():
    assert max_variance(np.array([0.0, 1e300, 1.0, -1e300]), 2) == [1, 3]
    assert max_variance(np.array([1e30, 0.0, 0.0]), 2) == [0, 2]


def test_of_binary_rewards_half_are_right():
    values = np.array([1.0] * 2 + [0.0] * 14)
    assert values[max_variance(values, 4)].sum() == 2
    values = np.array([1.0] * 15 + [0.0])
    assert values[max_variance(values, 4)].sum() == 3, "as many wrong ones as there are"


def test_it_is_not_quadratic():
    """A million rewards: a second or two for n log n, days for anything worse."""
    values = np.random.default_rng(0).normal(size=1_000_000)
    began = perf_counter()
    assert len(max_variance(values, 1000)) == 1000
    assert perf_counter() - began < 10


def test_the_others_are_masked_and_stay_in_the_baseline():
    units = table([0.0, 0.4, 0.5, 1.0])
    keep = MaxVariance(keep=2)
    assert keep.mask(summary(units)) == {"0/1/solver/0": "not_chosen", "0/2/solver/0": "not_chosen"}
    assert keep.verdict(summary(units), np.zeros(4, np.float32)) is None
    np.testing.assert_allclose(GroupMean(std=False).group(units), [-0.475, -0.075, 0.025, 0.525], atol=1e-6)


def test_or_are_out_of_it_as_in_the_paper():
    """Rewards 0 and 1 compared with each other: (r - 0.5) / 0.7071."""
    units = table([0.0, 0.4, 0.5, 1.0])
    credit = OfSubset(subset=MaxVariance(keep=2), credit=GroupMean())
    np.testing.assert_allclose(credit.group(units), [-0.7071, 0, 0, 0.7071], atol=1e-4)
    whitened = OfSubset(subset=MaxVariance(keep=2), credit=Whitened(credit=GroupMean(std=False)))
    first = whitened.group(units)
    np.testing.assert_allclose(whitened.batch([units], [first])[0], [-0.7071, 0, 0, 0.7071], atol=1e-4)
    around = Whitened(credit=OfSubset(subset=MaxVariance(keep=2), credit=GroupMean(std=False)))
    assert around.batch([units], [first])[0].tolist() == whitened.batch([units], [first])[0].tolist()


def test_a_small_group_stays_whole():
    units = table([0.0, 1.0, None])
    assert MaxVariance(keep=2).mask(summary(units)) == {}
    assert MaxVariance(keep=4).mask(summary(table([0.0, 1.0, 1.0]))) == {}
    assert MaxVariance(keep=2).mask(summary(table([1.0]))) == {}
    assert MaxVariance(keep=2).mask(summary(table([None]))) == {}


def test_an_episode_of_many_turns_is_one_choice():
    units = table([0, 1, 1, 1, 0, 0], episodes=[0, 0, 1, 1, 2, 2])
    assert MaxVariance(keep=2).chosen(units) == {1, 2}
    units = replace(units, counts=np.array([True, False] * 3))
    assert len(MaxVariance(keep=2).chosen(units)) == 2


def test_through_settling_the_chosen_alone_have_rows():
    verdict = settled([scored(0), scored(0.5), scored(0.5), scored(1)], keep=(MaxVariance(keep=2),))["m0"]
    assert verdict.reason is None
    assert [each.masked for each in verdict.samples] == [None, "not_chosen", "not_chosen", None]


def test_conformance():
    check_algorithm(lambda: MaxVariance(keep=3))
    check_algorithm(lambda: OfSubset(subset=MaxVariance(keep=3), credit=GroupMean()))
    units = group_summary(3).units
    assert len(MaxVariance(keep=3).chosen(units)) == 3


def test_a_subset_of_one_has_no_variance():
    with pytest.raises(ConfigError, match=r"MaxVariance.keep must be at least 2 episodes, found 1"):
        MaxVariance(keep=1)
