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
from astraflow.rollout.workflow import Reward
from astraflow.types import Trajectory


class UnknownName(Exception):
    """The reward names a role or a turn that the episode does not have: the workflow's own mistake."""


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
    scored = []
    for trajectory in trajectories:
        known = trajectory.role in by_role or episode is not None
        if not known and not any(turn.index in by_turn for turn in trajectory.turns):
            role = trajectory.role
            raise GraderFailed(f"role {role!r} spoke and got no reward at all; Reward({role}=None) says not scored")
        usual = by_role.get(trajectory.role, episode)
        turns = tuple(
            msgspec.structs.replace(
                turn,
                reward=by_turn.get(turn.index, usual),
                baseline_key=reward.baseline_keys.get(turn.index, turn.baseline_key),
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
            raise UnknownName(f"Reward names role {role!r}; the recipe's roles: {', '.join(sorted(roles))}")
    turns = {turn.index for trajectory in trajectories for turn in trajectory.turns}
    for index in (*reward.turns, *reward.baseline_keys):
        if index not in turns:
            raise UnknownName(f"Reward names turn {index!r}; the episode has turns {sorted(turns)}")


def _require_spoke(by_role: Mapping[str, float | None], trajectories: Sequence[Trajectory]) -> None:
    spoke = {trajectory.role for trajectory in trajectories}
    for role, value in by_role.items():
        if value is not None and role not in spoke:
            raise UnknownName(f"Reward gives role {role!r} {value!r}, but it never spoke in this episode; give it None")


def _number(what: str, value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, Real | np.bool_):
        raise GraderFailed(f"the reward of {what} must be a number or None, found {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise GraderFailed(f"the reward of {what} must be finite, found {number}")
    return number
