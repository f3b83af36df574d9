"""What advantage? One float32 per unit, from rewards compared with like: units of one ``baseline_key``.

Letters: U units; N episodes in which a key played; n units of the key in one episode. Inside everything is float64
(F40) and every sum is exactly rounded, so that the order of members can't change a bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from astraflow.algorithms.base import Credit, UnitTable
from astraflow.errors import ConfigError
from astraflow.types import Array

EPS = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupMean:
    """GRPO: reward minus the key's mean, over its deviation (``std``). ``std=False``: mean only (Dr. GRPO).
    ``leave_one_out`` (RLOO): the mean of the *other* episodes.

    A key's mean and deviation (n - 1) are over the means of its units per episode; each of n units in an episode
    weighs 1/n. All rewards of a key equal, compared exactly, or one episode only: 0. The deviation is at least that
    of units within their episodes: turns of episodes that come out even would otherwise be divided by almost nothing.
    """

    std: bool = True
    leave_one_out: bool = False

    def __post_init__(self) -> None:
        if self.std and self.leave_one_out:
            raise ConfigError("GroupMean: leave_one_out takes no deviation, pass std=False with it")

    def group(self, units: UnitTable) -> Array:
        advantages = np.zeros(len(units), np.float64)
        keys = np.array(units.baseline_key, dtype=object)
        for key in sorted(set(units.baseline_key)):
            rows = np.flatnonzero(units.counts & (keys == key))
            advantages[rows] = self._key(units.reward[rows], units.episode[rows])
        return advantages.astype(np.float32)

    def batch(self, units: Sequence[UnitTable], advantages: Sequence[Array]) -> list[Array]:
        return list(advantages)

    def _key(self, rewards: Array, episodes: Array) -> Array:
        if len(rewards) == 0 or rewards.min() == rewards.max():
            return np.zeros(len(rewards))
        _, of = np.unique(episodes, return_inverse=True)
        means = np.array([_mean(rewards[of == e]) for e in range(of.max() + 1)])
        count = len(means)
        if count < 2:
            return np.zeros(len(rewards))
        weights = 1.0 / np.bincount(of)[of]
        baseline = np.full(len(rewards), _mean(means))
        if self.leave_one_out:
            baseline = ((_mean(means) * count - means) / (count - 1))[of]
        deviation = 1.0
        if self.std:
            between = math.sqrt(math.fsum((means - _mean(means)) ** 2) / (count - 1))
            within = math.sqrt(math.fsum(weights * (rewards - means[of]) ** 2) / count)
            deviation = max(between, within) + EPS
        return np.asarray((rewards - baseline) / deviation * weights)


@dataclass(frozen=True, kw_only=True, slots=True)
class Returns:
    """The reward itself: plain REINFORCE, and recipes whose trainer makes the advantages (GAE, KL in the reward)."""

    def group(self, units: UnitTable) -> Array:
        return np.where(units.counts, units.reward, 0.0).astype(np.float32)

    def batch(self, units: Sequence[UnitTable], advantages: Sequence[Array]) -> list[Array]:
        return list(advantages)


@dataclass(frozen=True, kw_only=True, slots=True)
class Whitened:
    """Another Credit's advantages, brought to mean 0 and deviation 1 (n - 1) over all units of the batch.

    Over the whole batch, before it is cut into micro-batches: nothing the trainer does changes it (F37).
    Fewer than two units, or all equal: 0.
    """

    credit: Credit

    def group(self, units: UnitTable) -> Array:
        return self.credit.group(units)

    def batch(self, units: Sequence[UnitTable], advantages: Sequence[Array]) -> list[Array]:
        inner = self.credit.batch(units, advantages)
        if not units:
            return inner
        counted = np.concatenate([a[u.counts] for u, a in zip(units, inner, strict=True)]).astype(np.float64)
        if len(counted) < 2 or counted.min() == counted.max():
            return [np.zeros_like(each) for each in inner]
        mean = _mean(counted)
        deviation = math.sqrt(math.fsum((counted - mean) ** 2) / (len(counted) - 1)) + EPS
        return [
            np.where(u.counts, (a.astype(np.float64) - mean) / deviation, 0.0).astype(np.float32)
            for u, a in zip(units, inner, strict=True)
        ]


def _mean(values: Array) -> float:
    return math.fsum(values) / len(values)
