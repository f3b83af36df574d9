"""Advantages against closed forms, and what must hold for any rewards."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.algorithms.credit import GroupMean, Returns, Whitened
from astraflow.errors import ConfigError
from tests.unit.dataflow_pure.build import table

GRPO = GroupMean()
DR_GRPO = GroupMean(std=False)
RLOO = GroupMean(std=False, leave_one_out=True)


def of(credit, rewards, **more):
    return credit.group(table(rewards, **more))


@pytest.mark.parametrize(
    "rewards", [[0.1] * 16, [0.1] * 8, [0.9] * 3, [0.25] * 16, [0.0] * 4, [1.0] * 4, [0.35] * 8, [1e8] * 8]
)
@pytest.mark.parametrize("credit", [GRPO, DR_GRPO, RLOO])
def test_f34_equal_rewards_give_exactly_zero(credit, rewards):
    assert of(credit, rewards).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("credit", [GRPO, DR_GRPO, RLOO])
def test_f34_a_small_difference_is_signal(credit):
    assert np.all(of(credit, [0, 0, 0, 1e-3]) != 0)


@pytest.mark.parametrize("credit", [GRPO, DR_GRPO, RLOO])
@pytest.mark.parametrize("rewards", [[1.0], [1.0, None, None, None], [None], [None, None]])
def test_f35_one_that_counts_has_no_baseline(credit, rewards):
    assert of(credit, rewards).tolist() == [0.0] * len(rewards)


def test_f35_reinforce_of_one_is_chosen_by_name():
    assert of(Returns(), [1.0]).tolist() == [1.0]


def test_f35_whitening_of_one_unit_is_not_nan():
    whitened = Whitened(credit=Returns())
    assert whitened.batch([table([1.0])], [np.array([1], np.float32)])[0].tolist() == [0.0]
    assert whitened.batch([], []) == []


def test_f12_not_scored_is_neither_reward_nor_baseline():
    np.testing.assert_allclose(of(GRPO, [None, 1.0, 0.0, -1.0]), [0, 1, 0, -1], atol=2e-6)
    assert of(GRPO, [None, -1.0, -1.0, None]).tolist() == [0, 0, 0, 0]


def test_f36_members_are_grouped_by_key_never_by_position():
    np.testing.assert_allclose(of(GRPO, [1, 1, 0]), [0.5773, 0.5773, -1.1547], atol=1e-4)
    np.testing.assert_allclose(of(GRPO, [0, 0, 0, 1]), [-0.5, -0.5, -0.5, 1.5], atol=1e-5)
    interleaved = of(GRPO, [0, 1, 2, 3] * 8, keys=["g0", "g1", "g2", "g3"] * 8)
    assert not interleaved.any()


def test_f37_normalised_once_unless_asked():
    units = [table([1, 1, 0, 0]), table([1, 0, 0, 0])]
    once = [GRPO.group(each) for each in units]
    for answer, expected in zip(GRPO.batch(units, once), once, strict=True):
        assert answer.tobytes() == expected.tobytes()
    np.testing.assert_allclose(np.concatenate(once), [0.866] * 2 + [-0.866] * 2 + [1.5] + [-0.5] * 3, atol=1e-3)
    twice = Whitened(credit=GRPO).batch(units, once)
    np.testing.assert_allclose(
        np.concatenate(twice), [0.9354] * 2 + [-0.9354] * 2 + [1.6202] + [-0.5401] * 3, atol=1e-4
    )


def test_whitened_over_all_equal_advantages_is_zero_and_skips_units_that_do_not_count():
    units = [table([1, None]), table([1])]
    whitened = Whitened(credit=Returns())
    first = [whitened.group(each) for each in units]
    assert [each.tolist() for each in whitened.batch(units, first)] == [[0, 0], [0]]
    units = [table([1, None]), table([3])]
    first = [whitened.group(each) for each in units]
    np.testing.assert_allclose(np.concatenate(whitened.batch(units, first)), [-0.7071, 0, 0.7071], atol=1e-4)


@pytest.mark.parametrize(
    ("credit", "high", "low"),
    [(GRPO, 1.2076, -0.7246), (DR_GRPO, 0.625, -0.375), (RLOO, 0.7143, -0.4286), (Returns(), 1.0, 0.0)],
)
def test_f38_pinned_scales(credit, high, low):
    np.testing.assert_allclose(of(credit, [1, 1, 1, 0, 0, 0, 0, 0]), [high] * 3 + [low] * 5, atol=1e-4)


@pytest.mark.parametrize("scale", [1e6, 1e8])
def test_f40_large_rewards_keep_their_difference(scale):
    np.testing.assert_allclose(of(GRPO, [scale] * 7 + [scale + 1]), [-0.3536] * 7 + [2.4749], atol=1e-3)


def test_units_of_an_episode_weigh_one_together():
    """Means 0.5 and 0: mu 0.25, sigma 0.3536; two units weigh half each."""
    units = of(GRPO, [1, 0, 0], episodes=[0, 0, 1])
    np.testing.assert_allclose(units, [0.75 / 0.35355 / 2, -0.25 / 0.35355 / 2, -0.25 / 0.35355], atol=1e-4)
    many = of(DR_GRPO, [1] * 9 + [0], episodes=[0] * 9 + [1])
    np.testing.assert_allclose(many, [0.5 / 9] * 9 + [-0.5], atol=1e-7)


def test_an_even_episode_is_not_divided_by_nothing():
    """Every episode's mean is 0.5 (or a rounding away): the deviation within episodes is the scale then."""
    units = of(GRPO, [0.3, 0.2, 0.1, 0.1, 0.2, 0.3], episodes=[0, 0, 0, 1, 1, 1])
    assert np.abs(units).max() < 1
    np.testing.assert_allclose(of(GRPO, [1, 0, 0, 1], episodes=[0, 0, 1, 1]), [0.5, -0.5, -0.5, 0.5], atol=1e-5)


def test_roles_are_compared_with_their_like_only():
    units = of(DR_GRPO, [1, 0, 10, 20], episodes=[0, 1, 0, 1], keys=["solver", "solver", "verifier", "verifier"])
    assert units.tolist() == [0.5, -0.5, -5, 5]


def test_leave_one_out_takes_no_deviation():
    with pytest.raises(ConfigError, match="pass std=False"):
        GroupMean(leave_one_out=True)


def test_no_units():
    for credit in (GRPO, RLOO, Returns()):
        assert of(credit, []).shape == (0,)


@pytest.mark.parametrize("credit", [DR_GRPO, RLOO])
def test_sums_are_exact_whatever_the_order(credit):
    """A running sum of 1e16, 1, 1, -1e16 depends on the order: 0 or 2."""
    rewards = [1e16, 1.0, 1.0, -1e16]
    answers = {
        tuple(of(credit, [rewards[i] for i in order])[np.argsort(order)].tolist()) for order in permutations(range(4))
    }
    assert len(answers) == 1


# ── what holds for any rewards ──

REWARDS = st.floats(-100, 100, allow_nan=False, width=32)
UNITS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["solver", "verifier"]), st.none() | REWARDS), min_size=1, max_size=24
)


def _columns(units):
    return {"episodes": [e for e, _, _ in units], "keys": [k for _, k, _ in units]}


@pytest.mark.parametrize("credit", [GRPO, DR_GRPO, RLOO])
@given(units=UNITS)
def test_advantages_of_a_key_sum_to_zero(credit, units):
    advantages = of(credit, [r for _, _, r in units], **_columns(units)).astype(np.float64)
    for key in ("solver", "verifier"):
        assert abs(sum(a for a, (_, k, _) in zip(advantages, units, strict=True) if k == key)) < 1e-3


@pytest.mark.parametrize("credit", [GRPO, DR_GRPO, RLOO, Returns()])
@given(units=UNITS, data=st.data())
def test_order_of_units_changes_no_bit(credit, units, data):
    order = data.draw(st.permutations(range(len(units))))
    shuffled = [units[i] for i in order]
    straight = of(credit, [r for _, _, r in units], **_columns(units))
    mixed = of(credit, [r for _, _, r in shuffled], **_columns(shuffled))
    assert mixed.tobytes() == straight[order].tobytes()


@pytest.mark.parametrize("credit", [GRPO, DR_GRPO, RLOO])
@given(units=UNITS, data=st.data())
def test_names_of_episodes_change_no_bit(credit, units, data):
    names = data.draw(st.permutations(range(6)))
    renamed = [(names[e], k, r) for e, k, r in units]
    rewards = [r for _, _, r in units]
    assert of(credit, rewards, **_columns(units)).tobytes() == of(credit, rewards, **_columns(renamed)).tobytes()


@given(units=UNITS)
def test_grpo_is_bounded_by_the_number_of_episodes(units):
    """However close the episodes' means are, no advantage explodes."""
    assert np.abs(of(GRPO, [r for _, _, r in units], **_columns(units))).max() < 24


@given(rewards=st.lists(st.none() | st.sampled_from([0.1, 0.3, 0.7]), min_size=1, max_size=12), value=REWARDS)
def test_equal_rewards_are_zero_whatever_the_turns(rewards, value):
    equal = [None if reward is None else value for reward in rewards]
    assert not of(GRPO, equal, episodes=[i // 3 for i in range(len(equal))]).any()
