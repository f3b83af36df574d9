"""Rewards onto turns; what is no reward is a failure, never a zero."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from astraflow.errors import GraderFailed
from astraflow.rollout.score import UnknownName, resolve
from astraflow.rollout.workflow import Reward
from astraflow.types import Trajectory, Turn

HUGE = (10**400, -(10**400), 10**5000, Fraction(10**400), 1e300, np.longdouble(1e30) * 10)
"""No float can hold them, or no float32 their differences."""
ROLES = ("solver", "verifier", "judge")


def turn(index: int) -> Turn:
    return Turn(index=index, sample=0, start=1, stop=2)


TALK = (
    Trajectory(agent="solver", role="solver", policy="p", turns=(turn(0), turn(2))),
    Trajectory(agent="verifier", role="verifier", policy="p", turns=(turn(1),)),
)


def rewards(reward: Any, talk: tuple[Trajectory, ...] = TALK) -> dict[int, float | None]:
    scored = resolve(reward, talk, roles=ROLES)
    return {turn.index: turn.reward for each in scored.trajectories for turn in each.turns}


def test_a_role_s_value_goes_to_each_of_its_turns() -> None:
    assert rewards(Reward(solver=1.0, verifier=0.0)) == {0: 1.0, 2: 1.0, 1: 0.0}


def test_an_episode_s_value_goes_to_everyone_without_his_own() -> None:
    assert rewards(Reward(0.5)) == {0: 0.5, 2: 0.5, 1: 0.5}
    assert rewards(Reward(0.5, verifier=None)) == {0: 0.5, 2: 0.5, 1: None}


def test_a_turn_s_value_replaces_its_role_s() -> None:
    reward = Reward(solver=1.0, verifier=0.0, turns={2: -1.0, 1: None}, baseline_keys={0: "opening"})
    assert rewards(reward) == {0: 1.0, 2: -1.0, 1: None}
    keys = [t.baseline_key for each in resolve(reward, TALK, roles=ROLES).trajectories for t in each.turns]
    assert keys == ["opening", "", ""]


def test_f12_none_is_not_scored_and_not_zero() -> None:
    assert rewards(Reward(solver=None, verifier=1.0)) == {0: None, 2: None, 1: 1.0}
    assert resolve(Reward(solver=None, verifier=1.0), TALK, roles=ROLES).score == 1.0
    assert resolve(Reward(solver=None, verifier=None), TALK, roles=ROLES).score is None


def test_score_is_the_episode_s_value_else_the_mean_of_scored_turns() -> None:
    assert resolve(Reward(solver=1.0, verifier=0.0), TALK, roles=ROLES).score == pytest.approx(2 / 3)
    assert resolve(Reward(0.25, solver=1.0), TALK, roles=ROLES).score == 0.25
    assert resolve(Reward(0.25), (), roles=ROLES).score == 0.25


@pytest.mark.parametrize("value", [True, 1, 1.0, np.float32(1), np.int64(1), np.bool_(True)])
def test_any_number_is_a_number(value: Any) -> None:
    assert rewards(Reward(value)) == {0: 1.0, 2: 1.0, 1: 1.0}


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -float("inf"), "1.0", b"1", [1.0], {}, np.array([1.0]), *HUGE],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_finite_number_is_the_grader_s_failure(value: Any) -> None:
    for reward in (Reward(value), Reward(solver=value, verifier=1.0), Reward(1.0, turns={0: value})):
        with pytest.raises(GraderFailed, match="the reward of"):
            resolve(reward, TALK, roles=ROLES)


@pytest.mark.parametrize("value", HUGE, ids=lambda value: type(value).__name__)
def test_what_is_too_large_is_told_in_one_short_sentence(value: Any) -> None:
    with pytest.raises(GraderFailed, match=r"^the reward of the episode must be finite") as caught:
        resolve(Reward(value), TALK, roles=ROLES)
    assert len(str(caught.value)) < 200


def test_the_largest_rewards_have_a_mean() -> None:
    assert resolve(Reward(solver=1e30, verifier=1e30), TALK, roles=ROLES).score == pytest.approx(1e30)


@pytest.mark.parametrize("key", [5, None, b"opening", "half \ud800"])
def test_a_baseline_key_that_is_no_text_is_the_workflow_s_mistake(key: Any) -> None:
    with pytest.raises(UnknownName, match=r"^Reward.baseline_keys\[0\] must be text, found "):
        resolve(Reward(1.0, baseline_keys={0: key}), TALK, roles=ROLES)


def test_a_kind_of_text_is_a_baseline_key() -> None:
    keys = {0: np.str_("opening")}
    found = resolve(Reward(1.0, baseline_keys=keys), TALK, roles=ROLES).trajectories[0].turns[0].baseline_key
    assert (found, type(found)) == ("opening", str)


def test_none_for_the_episode_is_not_scored_for_everyone_without_his_own() -> None:
    assert rewards(Reward(None)) == {0: None, 2: None, 1: None}
    assert rewards(Reward(None, solver=1.0)) == {0: 1.0, 2: 1.0, 1: None}
    assert resolve(Reward(None), TALK, roles=ROLES).score is None
    assert resolve(Reward(None, solver=1.0), TALK, roles=ROLES).score == 1.0


@pytest.mark.parametrize("returned", [None, 1.0, "1.0", {"solver": 1.0}])
def test_what_is_no_reward_is_the_grader_s_failure(returned: Any) -> None:
    with pytest.raises(GraderFailed, match="must return a Reward, found"):
        resolve(returned, TALK, roles=ROLES)


@pytest.mark.parametrize("reward", [Reward(), Reward(solver=1.0), Reward(turns={0: 1.0, 2: 1.0})])
def test_a_role_that_spoke_and_got_nothing_is_the_grader_s_failure(reward: Reward) -> None:
    with pytest.raises(
        GraderFailed, match=r"'(solver|verifier)' spoke and got no reward at all; Reward\(\1=None\) says"
    ):
        resolve(reward, TALK, roles=ROLES)


def test_a_role_that_did_not_speak_needs_nothing_and_gets_nothing() -> None:
    assert rewards(Reward(solver=1.0, verifier=1.0, judge=None)) == {0: 1.0, 2: 1.0, 1: 1.0}
    with pytest.raises(UnknownName, match=r"gives role 'judge' 0.0, but it never spoke"):
        resolve(Reward(solver=1.0, verifier=1.0, judge=0.0), TALK, roles=ROLES)


def test_unknown_names_are_the_workflow_s_mistake() -> None:
    with pytest.raises(UnknownName, match=r"role 'slover'; the recipe's roles: judge, solver, verifier"):
        resolve(Reward(1.0, slover=1.0), TALK, roles=ROLES)
    with pytest.raises(UnknownName, match=r"turn 7; the episode has turns \[0, 1, 2\]"):
        resolve(Reward(1.0, turns={7: 1.0}), TALK, roles=ROLES)
