"""What advantage? One float32 per unit, from rewards compared with like: units of one ``baseline_key``.

Here: against the group (``GroupMean``), none (``Returns``), over the batch (``Whitened``, ``PerTask``). Of agents and
turns: ``credit_agents``; rewards that are changed before they are compared: ``credit_shapes``.
Letters: U units; N episodes in which a key played; n units of the key in one episode. A reward that float32 cannot hold
as an advantage (1e39 and more, where nothing divides by the deviation) stops the run by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from astraflow.algorithms.base import Credit, Narrows, UnitTable
from astraflow.algorithms.checks import check_part
from astraflow.algorithms.moments import EPS, mean, normalised, scale_of, to_float32
from astraflow.errors import ConfigError
from astraflow.types import Array

OVER = ("units", "tokens")
Credited = Callable[[Array, Array], Array]
"""(rewards, episodes) of the counted units of one key → their advantages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupMean:
    """GRPO (Shao et al. 2024, arXiv 2402.03300): reward minus the key's mean, over its deviation (``std``).
    ``std=False``: mean only (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783). ``leave_one_out`` (RLOO, Ahmadian et al.
    2024, arXiv 2402.14740): the mean of the *other* episodes.

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
        return by_key(units, units.baseline_key, self._key)

    def batch(self, units: Sequence[UnitTable], advantages: Sequence[Array]) -> list[Array]:
        return list(advantages)

    def _key(self, rewards: Array, episodes: Array) -> Array:
        if len(rewards) == 0 or rewards.min() == rewards.max():
            return np.zeros(len(rewards))
        _, of = np.unique(episodes, return_inverse=True)
        scale = scale_of(rewards)
        rewards = rewards / scale
        means = np.array([mean(rewards[of == e]) for e in range(of.max() + 1)])
        count = len(means)
        if count < 2:
            return np.zeros(len(rewards))
        weights = 1.0 / np.bincount(of)[of]
        baseline = np.full(len(rewards), mean(means))
        if self.leave_one_out:
            baseline = ((mean(means) * count - means) / (count - 1))[of]
        if not self.std:
            return np.asarray((rewards - baseline) * scale * weights)
        between = math.sqrt(math.fsum((means - mean(means)) ** 2) / (count - 1))
        within = math.sqrt(math.fsum(weights * (rewards - means[of]) ** 2) / count)
        return np.asarray((rewards - baseline) / (max(between, within) + EPS / scale) * weights)


@dataclass(frozen=True, kw_only=True, slots=True)
class Returns:
    """The reward itself: plain REINFORCE, and recipes whose trainer makes the advantages (GAE, KL in the reward)."""

    def group(self, units: UnitTable) -> Array:
        return to_float32(np.where(units.counts, units.reward, 0.0))

    def batch(self, units: Sequence[UnitTable], advantages: Sequence[Array]) -> list[Array]:
        return list(advantages)


@dataclass(frozen=True, kw_only=True, slots=True)
class Whitened:
    """Another Credit's advantages, brought to mean 0 and deviation 1 (n - 1) over all units of the batch; or over all
    of its tokens (``over="tokens"``: REINFORCE++, Hu 2025, arXiv 2501.03262).

    Over the whole batch, before it is cut into micro-batches: nothing the trainer does changes it (F37).
    Fewer than two units (tokens), or all equal: 0. Of replayed groups neither read nor changed.
    """

    credit: Credit
    over: str = "units"

    def __post_init__(self) -> None:
        check_part("Whitened.credit", self.credit, Credit)
        if self.over not in OVER:
            raise ConfigError(f"Whitened.over must be one of {', '.join(OVER)}, found {self.over!r}")

    def group(self, units: UnitTable) -> Array:
        return self.credit.group(units)

    def batch(self, units: Sequence[UnitTable], advantages: Sequence[Array]) -> list[Array]:
        inner = self.credit.batch(units, advantages)
        counted = [self.narrowed(each) for each in units]
        return _normalised_together(counted, inner, by_tokens=self.over == "tokens")

    def narrowed(self, units: UnitTable) -> UnitTable:
        return narrowed(self.credit, units)


@dataclass(frozen=True, kw_only=True, slots=True)
class PerTask:
    """Another Credit's advantages, normalised over the tokens of each dataset in the batch (AgentRL, Zhang et al. 2025,
    arXiv 2510.04206): (A - mu_task) / sigma_task, so that no task of a mixture drowns the others.

    One token of a dataset only, or all its advantages equal: 0.
    """

    credit: Credit

    def __post_init__(self) -> None:
        check_part("PerTask.credit", self.credit, Credit)

    def group(self, units: UnitTable) -> Array:
        return self.credit.group(units)

    def batch(self, units: Sequence[UnitTable], advantages: Sequence[Array]) -> list[Array]:
        found = self.credit.batch(units, advantages)
        for dataset in sorted({each.dataset for each in units}):
            places = [n for n, each in enumerate(units) if each.dataset == dataset]
            counted = [self.narrowed(units[n]) for n in places]
            mine = _normalised_together(counted, [found[n] for n in places], by_tokens=True)
            for n, answer in zip(places, mine, strict=True):
                found[n] = answer
        return found

    def narrowed(self, units: UnitTable) -> UnitTable:
        return narrowed(self.credit, units)


def narrowed(credit: Credit, units: UnitTable) -> UnitTable:
    """The units as ``credit`` compares them."""
    return credit.narrowed(units) if isinstance(credit, Narrows) else units


def by_key(units: UnitTable, keys: Sequence[str], of_key: Credited) -> Array:
    """float32 [U]: ``of_key(rewards, episodes)`` of the units that count, for each key by itself."""
    advantages = np.zeros(len(units), np.float64)
    named = np.array(keys, dtype=object)
    for key in sorted(set(keys)):
        rows = np.flatnonzero(units.counts & (named == key))
        advantages[rows] = of_key(units.reward[rows], units.episode[rows])
    return to_float32(advantages)


def _normalised_together(units: Sequence[UnitTable], advantages: Sequence[Array], *, by_tokens: bool) -> list[Array]:
    if not units:
        return list(advantages)
    counts = np.concatenate([each.counts for each in units])
    values = np.zeros(len(counts))
    tokens = np.concatenate([each.tokens for each in units])[counts].astype(np.float64) if by_tokens else None
    values[counts] = normalised(np.concatenate(list(advantages))[counts], tokens)
    edges = np.cumsum([len(each) for each in units])[:-1]
    return [to_float32(each) for each in np.split(values, edges)]
