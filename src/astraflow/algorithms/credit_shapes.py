"""Rewards that are changed before they are compared, as in ``Shaped(shapes=(TurnDiscount(gamma=0.9),), credit=...)``.

A shape takes a unit table and gives one with other rewards; fewer units may count in it, never more. Shapes apply in
order, then the Credit sees the result. The ledger keeps the workflow's own rewards, and ``DropZeroVariance`` compares
those: where equal rewards may be shaped apart, ``DropNoAdvantage`` is meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from astraflow.algorithms.base import Credit, UnitTable
from astraflow.algorithms.checks import check_finite, check_part, check_share, is_number
from astraflow.algorithms.credit import narrowed
from astraflow.algorithms.credit_agents import to_go
from astraflow.errors import ConfigError
from astraflow.types import Array


@runtime_checkable
class Shape(Protocol):
    def __call__(self, units: UnitTable) -> UnitTable:
        """The same units, in the same order, with other ``reward`` or fewer that count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shaped:
    """Another Credit on shaped rewards. A unit that no longer counts takes no gradient."""

    shapes: tuple[Shape, ...]
    credit: Credit

    def __post_init__(self) -> None:
        check_part("Shaped.credit", self.credit, Credit)
        if not isinstance(self.shapes, tuple | list):
            raise ConfigError(f"Shaped.shapes must be a list of shapes, found {type(self.shapes).__name__}")
        wrong = [each for each in self.shapes if isinstance(each, type) or not callable(each)]
        if wrong or not self.shapes:
            found = [getattr(each, "__name__", repr(each)) for each in wrong]
            raise ConfigError(f"Shaped.shapes must be at least one shape, objects and not classes, found {found}")
        object.__setattr__(self, "shapes", tuple(self.shapes))

    def group(self, units: UnitTable) -> Array:
        shaped = self._of(units)
        advantages = self.credit.group(shaped)
        return np.where(units.counts & shaped.counts, advantages, np.float32(0))

    def batch(self, units: Sequence[UnitTable], advantages: Sequence[Array]) -> list[Array]:
        return self.credit.batch([self._of(each) for each in units], advantages)

    def narrowed(self, units: UnitTable) -> UnitTable:
        return narrowed(self.credit, self._of(units))

    def _of(self, units: UnitTable) -> UnitTable:
        for shape in self.shapes:
            units = shape(units)
        return units


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnDiscount:
    """A turn is credited with what its agent earns from it on, later turns discounted by ``gamma`` each:
    R_t = sum over k >= t of gamma^(k-t) r_k, the return of reinforcement learning (Sutton & Barto, eq. 3.8).

    For rewards that turns earn, 0 where nothing: with a reward at the last of T turns alone, turn t has gamma^(T-t) of
    it. A reward of the whole episode stands at every turn, and would be summed once a turn.
    """

    gamma: float

    def __post_init__(self) -> None:
        check_share("TurnDiscount.gamma", self.gamma)

    def __call__(self, units: UnitTable) -> UnitTable:
        return replace(units, reward=to_go(units, self.gamma))


@dataclass(frozen=True, kw_only=True, slots=True)
class AtTheEnd:
    """Each agent's reward stands at its last turn in the episode that counts, and is 0 at the others: for what sums
    turns up (``TurnDiscount``, ``StateGroups``, a trainer with a critic), where the reward is of the whole episode."""

    def __call__(self, units: UnitTable) -> UnitTable:
        agents = [sample.rpartition("/")[0] for sample in units.sample_id]
        last: dict[str, int] = {}
        for n in np.flatnonzero(units.counts).tolist():
            if agents[n] not in last or units.turn[n] > units.turn[last[agents[n]]]:
                last[agents[n]] = n
        ends = np.zeros(len(units), np.bool_)
        ends[list(last.values())] = True
        return replace(units, reward=np.where(units.counts & ~ends, 0.0, units.reward))


@dataclass(frozen=True, kw_only=True, slots=True)
class ShorterIsBetter:
    """Length reward of Kimi k1.5 (2025, arXiv 2501.12599, 2.3.3), added to the reward: a right answer gets weight x l,
    a wrong one weight x min(0, l), where l = 0.5 - (length - shortest) / (longest - shortest), both extremes those of
    the key in the group. All of one length: 0.

    Right: a reward of at least ``passing``. Length: sampled tokens of the unit's key in the episode, all its turns
    together. (A penalty on long replies alone is the workflow's: ``rewards.overlong``.)
    """

    weight: float = 1.0
    passing: float = 1.0

    def __post_init__(self) -> None:
        if not (is_number(self.weight) and 0 <= self.weight < float("inf")):
            raise ConfigError(f"ShorterIsBetter.weight must be in [0, inf), found {self.weight}")
        check_finite("ShorterIsBetter.passing", self.passing)

    def __call__(self, units: UnitTable) -> UnitTable:
        reward, long = units.reward.copy(), lengths(units)
        keys = np.array(units.baseline_key, dtype=object)
        for key in set(units.baseline_key):
            rows = np.flatnonzero(units.counts & (keys == key))
            if len(rows) == 0 or long[rows].min() == long[rows].max():
                continue
            shortest, longest = long[rows].min(), long[rows].max()
            bonus = 0.5 - (long[rows] - shortest) / (longest - shortest)
            right = units.reward[rows] >= self.passing
            reward[rows] += self.weight * np.where(right, bonus, np.minimum(0.0, bonus))
        return replace(units, reward=reward)


@dataclass(frozen=True, kw_only=True, slots=True)
class Team:
    """Every unit shares in the episode's score: (1 - share) x own reward + share x score. 1: the team's reward alone,
    as cooperative agents are trained (Dec-POMDP; Oliehoek & Amato 2016). Without a score: the own reward."""

    share: float = 1.0

    def __post_init__(self) -> None:
        check_share("Team.share", self.share)

    def __call__(self, units: UnitTable) -> UnitTable:
        score = _known(units.score, units)
        mixed = (1 - self.share) * units.reward + self.share * score
        return replace(units, reward=np.where(np.isfinite(score), mixed, units.reward))


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Difference reward (Wolpert & Tumer 2001, "Optimal payoff functions for members of collectives"; the baseline of
    COMA, Foerster et al. 2018, arXiv 1705.08926): D_i = G(z) - G(z without i), the episode's score less what it would
    have been had this role done nothing.

    The workflow says the latter where it can tell: ``Reward(features={"without/ROLE": score})``. Else it is the mean
    score of the group's episodes in which the role did not play; where there is none, the unit does not count.
    """

    def __call__(self, units: UnitTable) -> UnitTable:
        score, without = _known(units.score, units), _known(units.without, units).copy()
        for role in sorted(set(units.role)):
            mine = np.array([each == role for each in units.role], np.bool_)
            rows = mine & ~np.isfinite(without)
            if rows.any():
                without[rows] = _score_without(units, score, set(units.episode[mine].tolist()))
        reward = score - without
        return replace(units, reward=reward, counts=units.counts & np.isfinite(reward))


def lengths(units: UnitTable) -> Array:
    """float64 [U]: sampled tokens of the unit's key in its episode."""
    places = list(zip(units.episode.tolist(), units.baseline_key, strict=True))
    total: dict[tuple[int, str], int] = {}
    for place, tokens in zip(places, units.tokens.tolist(), strict=True):
        total[place] = total.get(place, 0) + tokens
    return np.array([total[place] for place in places], np.float64)


def _score_without(units: UnitTable, score: Array, played: set[int]) -> float:
    """Mean over episodes; NaN where the role played in all."""
    by_episode = {
        int(episode): float(score[n])
        for n, episode in enumerate(units.episode)
        if units.counts[n] and int(episode) not in played and np.isfinite(score[n])
    }
    return float(np.mean(list(by_episode.values()))) if by_episode else np.nan


def _known(values: Array | None, units: UnitTable) -> Array:
    return np.full(len(units), np.nan) if values is None else values
