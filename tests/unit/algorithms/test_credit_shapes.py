"""Rewards changed before they are compared, each against its formula by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.algorithms.credit import GroupMean, PerTask, Returns, Whitened
from astraflow.algorithms.credit_shapes import (
    AtTheEnd,
    Difference,
    Shape,
    Shaped,
    ShorterIsBetter,
    Team,
    TurnDiscount,
    lengths,
)
from astraflow.errors import ConfigError
from astraflow.testing.check_algorithm import check_algorithm, unit_table
from tests.unit.dataflow_pure.build import table

SHAPES = [
    TurnDiscount(gamma=0.9),
    ShorterIsBetter(),
    Team(share=0.5),
    AtTheEnd(),
    Difference(),
]


def reward(shape, units):
    return shape(units).reward


def long(rewards, tokens, **more):
    return replace(table(rewards, **more), tokens=np.array(tokens, np.int64))


def scores(units, score, without=None):
    hidden = [np.nan] * len(units) if without is None else without
    return replace(units, score=np.array(score, np.float64), without=np.array(hidden, np.float64))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("credit", [GroupMean(), Whitened(credit=Returns()), Returns()])
def test_conformance(shape, credit):
    assert isinstance(shape, Shape)
    check_algorithm(lambda: Shaped(shapes=(shape,), credit=credit))


@given(seed=st.integers(0, 100), shape=st.sampled_from(SHAPES))
def test_what_did_not_count_still_does_not(seed, shape):
    units = unit_table(seed)
    before = units.reward.copy()
    shaped = shape(units)
    assert not (shaped.counts & ~units.counts).any()
    assert np.isfinite(shaped.reward[shaped.counts]).all()
    np.testing.assert_array_equal(units.reward, before)


def test_a_discounted_turn():
    """The last of three turns wins: 0.25, 0.5, 1; a lost episode stays 0 throughout."""
    units = table([0, 0, 1, 0, 0], episodes=[0, 0, 0, 1, 1])
    assert reward(TurnDiscount(gamma=0.5), units).tolist() == [0.25, 0.5, 1, 0, 0]
    found = Shaped(shapes=(TurnDiscount(gamma=0.5),), credit=Returns()).group(units)
    assert found.tolist() == [0.25, 0.5, 1, 0, 0]


def test_a_reward_of_the_whole_episode_is_earned_once():
    """Agent a plays turns 0, 1 and 4 of episode 0, of which 4 does not count; b turn 2; a again in episode 1."""
    units = table([1, 1, 1, 0.5, None], episodes=[0, 0, 0, 1, 0], keys=["a", "a", "b", "a", "a"])
    found = reward(AtTheEnd(), units)
    assert found[:4].tolist() == [0, 1, 1, 0.5] and np.isnan(found[4])
    both = Shaped(shapes=(AtTheEnd(), TurnDiscount(gamma=0.5)), credit=Returns()).group(units)
    assert both.tolist() == [0.5, 1, 1, 0.5, 0]


def test_length_is_that_of_the_agent_in_its_episode():
    units = long([1] * 4, [10, 20, 5, 7], episodes=[0, 0, 0, 1], keys=["a", "a", "b", "a"])
    assert lengths(units).tolist() == [30, 30, 5, 7]


def test_shorter_right_answers_are_better_and_wrong_ones_never():
    """Lengths 10, 20, 30, 20 of a right, a right, a wrong and a wrong answer: l = 0.5, 0, -0.5, 0."""
    units = long([1, 1, 0, 0], [10, 20, 30, 20])
    np.testing.assert_allclose(reward(ShorterIsBetter(), units), [1.5, 1, -0.5, 0])
    np.testing.assert_allclose(reward(ShorterIsBetter(weight=0.2), units), [1.1, 1, -0.1, 0])
    swapped = long([0, 1], [10, 30])
    np.testing.assert_allclose(reward(ShorterIsBetter(), swapped), [0, 0.5])
    assert reward(ShorterIsBetter(), long([1, 0], [10, 10])).tolist() == [1, 0]


def test_what_is_right_is_an_option():
    units = long([0.6, 0.4], [10, 30])
    np.testing.assert_allclose(reward(ShorterIsBetter(passing=0.5), units), [1.1, -0.1])


def test_a_team_shares_its_score():
    units = scores(table([1.0, 0.0, 0.5], episodes=[0, 0, 1], keys=["s", "v", "s"]), [0.5, 0.5, np.nan])
    assert reward(Team(), units).tolist() == [0.5, 0.5, 0.5], "without a score, one's own"
    assert reward(Team(share=0.5), units).tolist() == [0.75, 0.25, 0.5]
    assert reward(Team(share=0), units).tolist() == [1.0, 0.0, 0.5]
    assert reward(Team(), table([1.0, 0.0])).tolist() == [1.0, 0.0]


def test_a_difference_reward_is_what_the_role_added():
    units = scores(table([1, 1, 1], keys=["s"] * 3), [1.0, 0.0, 0.7], [0.4, 0.0, 0.9])
    np.testing.assert_allclose(reward(Difference(), units), [0.6, 0.0, -0.2])


def test_where_nobody_said_the_episodes_without_the_role_tell():
    """The helper played in episodes 0 and 1 (scores 1, 0), not in 2 and 3 (scores 0.5, 0): mean 0.25."""
    units = table(
        [1] * 6, episodes=[0, 1, 0, 1, 2, 3], keys=["helper", "helper", "solver", "solver", "solver", "solver"]
    )
    shaped = Difference()(scores(units, [1, 0, 1, 0, 0.5, 0]))
    np.testing.assert_allclose(shaped.reward[:2], [0.75, -0.25])
    assert shaped.counts.tolist() == [True, True, False, False, False, False], "nothing tells of the solver's absence"
    found = Shaped(shapes=(Difference(),), credit=Returns()).group(scores(units, [1, 0, 1, 0, 0.5, 0]))
    np.testing.assert_allclose(found, [0.75, -0.25, 0, 0, 0, 0])


def test_without_a_score_there_is_no_difference():
    shaped = Difference()(table([1.0, 0.0]))
    assert not shaped.counts.any()
    assert Shaped(shapes=(Difference(),), credit=GroupMean()).group(table([1.0, 0.0])).tolist() == [0, 0]


def test_shapes_apply_in_order_and_the_batch_sees_them_too():
    units = [scores(table([0, 1], episodes=[0, 0]), [0.5, 0.5]), scores(table([1, 0], episodes=[0, 0]), [1, 1])]
    shapes = (Team(share=0.5), TurnDiscount(gamma=1.0))
    credit = Shaped(shapes=shapes, credit=Whitened(credit=Returns()))
    first = [credit.group(each) for each in units]
    assert [each.tolist() for each in first] == [[1.0, 0.75], [1.5, 0.5]]
    other = Shaped(shapes=shapes[::-1], credit=Returns()).group(units[0])
    np.testing.assert_allclose(other, [0.75, 0.75])
    whitened = np.concatenate(credit.batch(units, first)).astype(np.float64)
    assert abs(whitened.mean()) < 1e-6 and abs(whitened.std(ddof=1) - 1) < 1e-5


def test_no_longer_counted_units_are_not_in_the_batchs_statistics():
    units = [scores(table([1, 1]), [1, 0], [0.5, np.nan]), scores(table([1]), [3], [0.5])]
    credit = Shaped(shapes=(Difference(),), credit=Whitened(credit=Returns()))
    found = credit.batch(units, [credit.group(each) for each in units])
    np.testing.assert_allclose(np.concatenate(found), [-0.7071, 0, 0.7071], atol=1e-4)


@pytest.mark.parametrize("around", [Whitened, PerTask])
def test_nor_where_the_statistics_are_around_the_shapes(around):
    """1 has no score without its role: it stays at 0, in no statistics; .5 and 2.5 are 1.4142 apart from each other."""
    units = [
        scores(replace(table([1, 1]), tokens=np.array([1, 7])), [1, 0], [0.5, np.nan]),
        scores(table([1]), [3], [0.5]),
    ]
    units[1] = replace(units[1], tokens=np.array([1]))
    for credit in (
        around(credit=Shaped(shapes=(Difference(),), credit=Returns())),
        around(credit=around(credit=Shaped(shapes=(Difference(),), credit=Returns()))),
    ):
        found = credit.batch(units, [credit.group(each) for each in units])
        np.testing.assert_allclose(np.concatenate(found), [-0.7071, 0, 0.7071], atol=1e-4)


# ── over the batch ──


def of(dataset, rewards, tokens):
    return replace(long(rewards, tokens), dataset=dataset)


def test_per_task_normalises_the_tokens_of_each_dataset():
    """math: A = 1 (3 tokens) and 0 (1 token): mu 0.75, sigma of n - 1 = 0.5. code: 10 and 20, one token each."""
    units = [of("math", [1], [3]), of("code", [10, 20], [1, 1]), of("math", [0], [1])]
    credit = PerTask(credit=Returns())
    found = credit.batch(units, [credit.group(each) for each in units])
    np.testing.assert_allclose(found[0], [0.5], atol=1e-5)
    np.testing.assert_allclose(found[1], [-0.7071, 0.7071], atol=1e-5)
    np.testing.assert_allclose(found[2], [-1.5], atol=1e-5)


def test_per_task_does_not_see_other_tasks():
    credit = PerTask(credit=Returns())
    alone = credit.batch([of("a", [1, 0], [2, 2])], [np.array([1, 0], np.float32)])
    units = [of("b", [1e9, -5], [7, 9]), of("a", [1, 0], [2, 2])]
    both = credit.batch(units, [credit.group(each) for each in units])
    assert both[1].tobytes() == alone[0].tobytes()


def test_per_task_of_one_token_or_equal_advantages_is_zero():
    credit = PerTask(credit=Returns())
    units = [of("a", [5], [1]), of("b", [2, 2], [4, 9]), of("c", [None, None], [3, 3])]
    found = credit.batch(units, [credit.group(each) for each in units])
    assert not np.concatenate(found).any()
    assert credit.batch([], []) == []


def test_whitened_over_tokens_weighs_units_by_their_length():
    units = [long([1], [3]), long([0], [1])]
    credit = Whitened(credit=Returns(), over="tokens")
    found = credit.batch(units, [credit.group(each) for each in units])
    np.testing.assert_allclose(np.concatenate(found), [0.5, -1.5], atol=1e-5)
    tokens = np.repeat([found[0][0], found[1][0]], [3, 1]).astype(np.float64)
    assert abs(tokens.mean()) < 1e-6 and abs(tokens.std(ddof=1) - 1) < 1e-5
    with pytest.raises(ConfigError, match=r"Whitened\.over must be one of units, tokens, found 'rows'"):
        Whitened(credit=Returns(), over="rows")


@pytest.mark.parametrize("credit", [GroupMean(), Whitened(credit=GroupMean()), PerTask(credit=GroupMean())])
def test_rewards_of_1e30_are_finite(credit):
    units = [table([1e30, -1e30, 0, 0]), table([1e30, 0])]
    found = credit.batch(units, [credit.group(each) for each in units])
    assert np.isfinite(np.concatenate(found)).all()
    assert all(each.any() for each in found)


def test_what_float32_cannot_hold_is_infinite_and_refused_where_it_is_read():
    assert np.isinf(Returns().group(table([1e39]))).all()
    assert np.isinf(GroupMean(std=False).group(table([1e40, 0]))).all()
    assert np.isfinite(GroupMean().group(table([1e300, 0]))).all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TurnDiscount(gamma=-0.1), r"TurnDiscount.gamma must be in \[0, 1\], found -0.1"),
        (lambda: ShorterIsBetter(weight=float("inf")), "ShorterIsBetter.weight must be"),
        (lambda: Team(share=2), r"Team.share must be in \[0, 1\], found 2"),
        (lambda: Shaped(shapes=(), credit=Returns()), "at least one shape"),
        (lambda: Shaped(shapes=(Team,), credit=Returns()), r"not classes, found \['Team'\]"),
        (lambda: Shaped(shapes=(3,), credit=Returns()), r"found \['3'\]"),
    ],
)
def test_options_out_of_range_are_refused_by_name(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
