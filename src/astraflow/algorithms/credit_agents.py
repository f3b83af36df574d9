"""Advantages of several agents and of many turns: each agent by its own measure, each turn against its own state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from astraflow.algorithms.base import UnitTable
from astraflow.algorithms.checks import check_share, is_number
from astraflow.algorithms.credit import by_key
from astraflow.algorithms.moments import normalised, to_float32
from astraflow.errors import ConfigError
from astraflow.types import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class PerAgent:
    """Dr.MAS (Feng et al. 2026, arXiv 2602.08847): (R - mu_k) / sigma_k, the statistics of agent k over all of *its*
    turns in the group, whatever the other agents of the policy earn. ``std=False``: the mean only.

    An agent is a ``baseline_key``, so its role unless the workflow says otherwise. Unlike in ``GroupMean`` every turn
    counts once: an agent that speaks often in an episode has that episode's reward so many times in its statistics, and
    its turns together more gradient. One episode only, or all rewards of the key equal: 0.
    """

    std: bool = True

    def group(self, units: UnitTable) -> Array:
        return by_key(units, units.baseline_key, self._key)

    def batch(self, units: Sequence[UnitTable], advantages: Sequence[Array]) -> list[Array]:
        return list(advantages)

    def _key(self, rewards: Array, episodes: Array) -> Array:
        if len(set(episodes.tolist())) < 2:
            return np.zeros(len(rewards))
        return normalised(rewards, std=self.std)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateGroups:
    """GiGPO (Feng et al. 2025, arXiv 2505.10978): A = A_episode + omega x A_state.

    A_episode compares what an agent earned in the whole episode with its other episodes of the group. A_state compares
    the discounted return R_t = sum over k >= t of gamma^(k-t) r_k from a turn on with the returns of all turns of the
    group that were taken in the same state; a state seen once adds 0. Both are normalised as ``std`` says (mean alone:
    ``False``).

    The workflow names the state that a turn was asked in by the turn's baseline key (``Reward(baseline_keys=...)``: a
    hash of what the agent sees); agents of one role share states. Turn rewards are what each turn earned, 0 where
    nothing: a reward of the whole episode belongs to its last turn alone, or it would be earned once a turn. Beside it
    use ``DropNoAdvantage``: ``DropZeroVariance`` compares rewards of one key.
    """

    omega: float = 1.0
    gamma: float = 0.95
    std: bool = True

    def __post_init__(self) -> None:
        if not (is_number(self.omega) and 0 <= self.omega < float("inf")):
            raise ConfigError(f"StateGroups.omega must be in [0, inf), found {self.omega}")
        check_share("StateGroups.gamma", self.gamma)

    def group(self, units: UnitTable) -> Array:
        whole = by_key(units, units.role, self._episodes)
        returns = to_go(units, self.gamma)
        keys = [f"{role}\0{state}" for role, state in zip(units.role, units.baseline_key, strict=True)]
        steps = np.zeros(len(units))
        named = np.array(keys, dtype=object)
        for key in sorted(set(keys)):
            rows = np.flatnonzero(units.counts & (named == key))
            steps[rows] = normalised(returns[rows], std=self.std)
        return to_float32(whole.astype(np.float64) + self.omega * steps)

    def batch(self, units: Sequence[UnitTable], advantages: Sequence[Array]) -> list[Array]:
        return list(advantages)

    def _episodes(self, rewards: Array, episodes: Array) -> Array:
        _, of = np.unique(episodes, return_inverse=True)
        earned = np.zeros(int(of.max()) + 1 if len(of) else 0)
        np.add.at(earned, of, rewards)
        return np.asarray(normalised(earned, std=self.std)[of]) if len(of) else earned


def to_go(units: UnitTable, gamma: float) -> Array:
    """float64 [U]: each agent's discounted return from each of its counted turns on, within its episode; NaN where a
    unit does not count. A turn that does not count earns nothing, and takes no time."""
    returns = np.full(len(units), np.nan)
    agents = [sample.rpartition("/")[0] for sample in units.sample_id]
    for agent in sorted(set(agents)):
        rows = [n for n in np.flatnonzero(units.counts) if agents[n] == agent]
        later = 0.0
        for row in sorted(rows, key=lambda n: int(units.turn[n]), reverse=True):
            later = float(units.reward[row]) + gamma * later
            returns[row] = later
    return returns
