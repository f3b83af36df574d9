"""Per agent and per state, against closed forms on a handful of turns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.algorithms.credit import GroupMean
from astraflow.algorithms.credit_agents import PerAgent, StateGroups, to_go
from astraflow.errors import ConfigError
from astraflow.testing.check_algorithm import check_algorithm, unit_table
from tests.unit.dataflow_pure.build import table


def states(rewards, episodes, keys, *, roles=None):
    """Turns in order; the key of each is the state that it was asked in."""
    units = table(rewards, episodes=episodes, keys=keys)
    names = tuple(roles or ["solver"] * len(rewards))
    ids = tuple(f"0/{episode}/{name}/0" for episode, name in zip(episodes, names, strict=True))
    return replace(units, role=names, sample_id=ids)


@pytest.mark.parametrize(
    "make", [PerAgent, lambda: PerAgent(std=False), StateGroups, lambda: StateGroups(omega=0.5, gamma=1.0, std=False)]
)
def test_conformance(make):
    check_algorithm(make)


# ── per agent ──


def test_each_agent_has_its_own_mean_and_deviation():
    """Solver 1, 0, 0 and verifier 10, 20, 30: (R - mu_k) / sigma_k with sigma of n - 1."""
    units = table([1, 0, 0, 10, 20, 30], episodes=[0, 1, 2, 0, 1, 2], keys=["solver"] * 3 + ["verifier"] * 3)
    sigma = (2 / 3 / 2) ** 0.5
    np.testing.assert_allclose(
        PerAgent().group(units), [2 / 3 / sigma, -1 / 3 / sigma, -1 / 3 / sigma, -1, 0, 1], atol=1e-5
    )
    np.testing.assert_allclose(PerAgent(std=False).group(units), [2 / 3, -1 / 3, -1 / 3, -10, 0, 10], atol=1e-5)


def test_f100_one_agent_is_not_moved_by_the_other():
    verifier = [0.25, 0.75, 0.5]
    alone = PerAgent().group(table(verifier))
    for solver in ([1, 0, 0], [1e6, -1e6, 3.0]):
        both = PerAgent().group(table([*solver, *verifier], episodes=[0, 1, 2] * 2, keys=["s"] * 3 + ["v"] * 3))
        assert both[3:].tobytes() == alone.tobytes()


def test_every_turn_counts_once():
    """Two turns of reward 1 in one episode, one of 0 in another: mu 2/3, and GroupMean's, by episode, 1/2."""
    units = table([1, 1, 0], episodes=[0, 0, 1])
    np.testing.assert_allclose(PerAgent(std=False).group(units), [1 / 3, 1 / 3, -2 / 3], atol=1e-6)
    np.testing.assert_allclose(GroupMean(std=False).group(units), [0.25, 0.25, -0.5], atol=1e-6)


def test_one_turn_an_episode_is_grpo():
    units = table([1, 1, 1, 0, 0, 0, 0, 0])
    np.testing.assert_allclose(PerAgent().group(units), GroupMean().group(units), atol=1e-6)


@pytest.mark.parametrize("credit", [PerAgent(), StateGroups()])
def test_f35_one_member_has_no_baseline(credit):
    assert credit.group(table([1.0])).tolist() == [0.0]
    assert credit.group(table([1.0, None, None])).tolist() == [0.0] * 3
    assert credit.group(table([])).tolist() == []


def test_f35_one_episode_of_several_turns_has_no_baseline():
    assert PerAgent().group(table([1, 0, 0], episodes=[0, 0, 0])).tolist() == [0, 0, 0]


@pytest.mark.parametrize("credit", [PerAgent(), PerAgent(std=False), StateGroups()])
@pytest.mark.parametrize("reward", [0.1, 0.35, 1e30])
def test_f34_equal_rewards_give_exactly_zero(credit, reward):
    assert not credit.group(table([reward] * 6)).any()


@pytest.mark.parametrize("credit", [PerAgent(), StateGroups(omega=0)])
def test_f40_huge_rewards_keep_their_difference(credit):
    np.testing.assert_allclose(credit.group(table([1e8] * 7 + [1e8 + 1])), [-0.3536] * 7 + [2.4749], atol=1e-3)
    np.testing.assert_allclose(credit.group(table([1e30, 0, 0, 0])), [1.5, -0.5, -0.5, -0.5], atol=1e-6)
    np.testing.assert_allclose(credit.group(table([1e308, -1e308])), [0.7071, -0.7071], atol=1e-3)


# ── per state ──


def test_returns_to_go():
    units = states([0, 0, 1, 2], [0, 0, 0, 1], ["a", "b", "c", "a"])
    np.testing.assert_allclose(to_go(units, 0.5), [0.25, 0.5, 1, 2])
    np.testing.assert_allclose(to_go(units, 0.0), [0, 0, 1, 2])
    np.testing.assert_allclose(to_go(units, 1.0), [1, 1, 1, 2])
    gap = states([1, None, 1], [0, 0, 0], ["a", "b", "c"])
    np.testing.assert_allclose(to_go(gap, 0.5), [1.5, np.nan, 1.0])


def test_returns_are_an_agents_own():
    """Two roles take turns in one episode: neither is paid for what the other earns."""
    units = states([1, 10, 1, 10], [0] * 4, ["s"] * 4, roles=["solver", "verifier"] * 2)
    np.testing.assert_allclose(to_go(units, 1.0), [2, 20, 1, 10])


def test_the_order_is_that_of_the_turns_whatever_the_order_of_rows():
    units = states([0, 0, 4], [0, 0, 0], ["a", "b", "c"])
    back = replace(units, turn=units.turn[::-1].copy(), reward=units.reward[::-1].copy())
    np.testing.assert_allclose(to_go(units, 0.5), [1, 2, 4])
    np.testing.assert_allclose(to_go(back, 0.5), [4, 2, 1])


def test_an_episode_and_a_state_are_each_compared_with_their_like():
    """Episode 0: a, b, won; episode 1: a, c, lost. State a was seen by both, b and c once each.

    Episode returns 1 and 0: mean 1/2. In a: returns 0.5 and 0: mean 1/4. b, c: nothing to be compared with.
    """
    units = states([0, 1, 0, 0], [0, 0, 1, 1], ["a", "b", "a", "c"])
    found = StateGroups(gamma=0.5, std=False).group(units)
    np.testing.assert_allclose(found, [0.5 + 0.25, 0.5, -0.5 - 0.25, -0.5], atol=1e-6)
    half = StateGroups(gamma=0.5, std=False, omega=0.5).group(units)
    np.testing.assert_allclose(half, [0.5 + 0.125, 0.5, -0.5 - 0.125, -0.5], atol=1e-6)
    scaled = StateGroups(gamma=0.5).group(units)
    np.testing.assert_allclose(scaled, [2 * 0.5**0.5, 0.5**0.5, -2 * 0.5**0.5, -(0.5**0.5)], atol=1e-4)


def test_a_state_seen_twice_by_one_episode_counts_twice():
    """Returns in a: 1 (first visit), 1 (second) and 0: mean 2/3."""
    units = states([0, 1, 0], [0, 0, 1], ["a", "a", "a"])
    found = StateGroups(gamma=1.0, std=False).group(units)
    np.testing.assert_allclose(found, [0.5 + 1 / 3, 0.5 + 1 / 3, -0.5 - 2 / 3], atol=1e-6)


def test_states_of_two_roles_are_not_mixed():
    units = states([1, 0, 5, 3], [0, 1, 0, 1], ["a"] * 4, roles=["solver"] * 2 + ["verifier"] * 2)
    np.testing.assert_allclose(StateGroups(gamma=1.0, std=False).group(units), [1.0, -1.0, 2.0, -2.0], atol=1e-6)


def test_without_states_it_is_the_episodes_comparison():
    rewards = [1, 0, 0, 1, 1]
    units = states(rewards, range(5), [f"own {n}" for n in range(5)])
    np.testing.assert_allclose(StateGroups().group(units), GroupMean().group(table(rewards)), atol=1e-5)


@given(seed=st.integers(0, 200))
def test_state_advantages_sum_to_zero_within_each_state(seed):
    units = unit_table(seed)
    keys = tuple(f"{role}{turn % 3}" for role, turn in zip(units.role, units.turn.tolist(), strict=True))
    units = replace(units, baseline_key=keys)
    both = StateGroups(std=False).group(units).astype(np.float64)
    whole = StateGroups(std=False, omega=0).group(units).astype(np.float64)
    for role in set(units.role):
        for key in set(keys):
            rows = [n for n in range(len(units)) if keys[n] == key and units.role[n] == role and units.counts[n]]
            assert abs((both - whole)[rows].sum()) < 1e-5
    assert not both[~units.counts].any()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"omega": -1}, r"StateGroups.omega must be in \[0, inf\), found -1"),
        ({"gamma": 1.1}, r"StateGroups.gamma must be in \[0, 1\], found 1.1"),
        ({"gamma": float("nan")}, "StateGroups.gamma must be"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options, words):
    with pytest.raises(ConfigError, match=words):
        StateGroups(**options)
