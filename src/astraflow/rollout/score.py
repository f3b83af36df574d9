"""What a workflow returned becomes a reward per turn, or a failure: never a zero that nobody gave (F12, F13)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import msgspec
import numpy as np

from astraflow.errors import GraderFailed
from astraflow.rollout.said import is_text, shown
from astraflow.rollout.workflow import Reward
from astraflow.types import Trajectory

LARGEST = 1e30
"""Of a reward: sums and differences of such still fit a float32, in which is trained."""


class UnknownName(Exception):
    """The reward names what the episode does not have, or by what is no name: the workflow's own mistake."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    trajectories: tuple[Trajectory, ...]
    score: float | None


def resolve(reward: Any, trajectories: Sequence[Trajectory], *, roles: Sequence[str]) -> Scored:
    """Spread the values over turns: a turn's own, else its role's, else the episode's.

    Raises GraderFailed (not a Reward, not a finite number, a role that spoke and got nothing at all) and UnknownName.
    """
    if not isinstance(reward, Reward):
        raise GraderFailed(f"the workflow must return a Reward, found {type(reward).__name__}")
    _check_names(reward, trajectories, roles)
    episode = _number("the episode", reward.episode)
    by_role = {role: _number(f"role {role!r}", value) for role, value in reward.roles.items()}
    by_turn = {turn: _number(f"turn {turn}", value) for turn, value in reward.turns.items()}
    keys = {turn: _key(turn, value) for turn, value in reward.baseline_keys.items()}
    scored = []
    for trajectory in trajectories:
        known = trajectory.role in by_role or reward.is_for_all or episode is not None
        if not known and not any(turn.index in by_turn for turn in trajectory.turns):
            role = trajectory.role
            raise GraderFailed(f"role {role!r} spoke and got no reward at all; Reward({role}=None) says not scored")
        usual = by_role.get(trajectory.role, episode)
        turns = tuple(
            msgspec.structs.replace(
                turn,
                reward=by_turn.get(turn.index, usual),
                baseline_key=keys.get(turn.index, turn.baseline_key),
            )
            for turn in trajectory.turns
        )
        scored.append(msgspec.structs.replace(trajectory, turns=turns))
    _require_spoke(by_role, trajectories)
    values = [turn.reward for each in scored for turn in each.turns if turn.reward is not None]
    mean = math.fsum(values) / len(values) if values else None
    return Scored(trajectories=tuple(scored), score=mean if episode is None else episode)


def _check_names(reward: Reward, trajectories: Sequence[Trajectory], roles: Sequence[str]) -> None:
    for role in reward.roles:
        if role not in roles:
            raise UnknownName(f"Reward names role {shown(role)}; the recipe's roles: {', '.join(sorted(roles))}")
    turns = {turn.index for trajectory in trajectories for turn in trajectory.turns}
    for index in (*reward.turns, *reward.baseline_keys):
        if index not in turns:
            raise UnknownName(f"Reward names turn {shown(index)}; the episode has turns {sorted(turns)}")


def _require_spoke(by_role: Mapping[str, float | None], trajectories: Sequence[Trajectory]) -> None:
    spoke = {trajectory.role for trajectory in trajectories}
    for role, value in by_role.items():
        if value is not None and role not in spoke:
            raise UnknownName(f"Reward gives role {role!r} {value!r}, but it never spoke in this episode; give it None")


def _number(what: str, value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, Real | np.bool_):
        raise GraderFailed(f"the reward of {what} must be a number or None, found {shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf  # an integer or a fraction that no float can hold
    if not abs(number) <= LARGEST:
        limit = f" and at most {LARGEST:g} in size" if math.isfinite(number) else ""
        raise GraderFailed(f"the reward of {what} must be finite{limit}, found {shown(value)}")
    return number


def _key(turn: int, value: Any) -> str:
    if not is_text(value):
        raise UnknownName(f"Reward.baseline_keys[{turn}] must be text, found {shown(value)}")
    return str.__str__(value)
