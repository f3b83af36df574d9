"""Of a group, the members worth training: PODS keeps the subset whose rewards differ most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from astraflow.algorithms.base import Credit, GroupSummary, UnitTable
from astraflow.algorithms.checks import check_at_least, check_part
from astraflow.algorithms.credit import narrowed
from astraflow.algorithms.moments import mean, scale_of
from astraflow.types import Array

NOT_CHOSEN = "not_chosen"


@dataclass(frozen=True, kw_only=True, slots=True)
class MaxVariance:
    """PODS, max-variance down-sampling (Xu et al. 2025, arXiv 2504.13818): of the episodes of a group, ``keep`` take
    gradient, those whose rewards have the largest variance among all choices of so many: some of the highest and the
    rest of the lowest. The others are masked (``not_chosen``); groups with no more than ``keep`` stay whole.

    An episode's reward is the mean of the policy's counted units in it. The others' rewards stay in the baseline; to
    compare the chosen with each other alone, as the paper does, wrap the Credit in ``OfSubset`` with the same ``keep``.
    """

    keep: int

    def __post_init__(self) -> None:
        check_at_least("MaxVariance.keep", self.keep, 2, of=" episodes")

    def verdict(self, summary: GroupSummary, advantages: Array) -> str | None:
        return None

    def mask(self, summary: GroupSummary) -> dict[str, str]:
        units = summary.units
        chosen = self.chosen(units)
        return {
            units.sample_id[n]: NOT_CHOSEN for n in np.flatnonzero(units.counts) if int(units.episode[n]) not in chosen
        }

    def chosen(self, units: UnitTable) -> frozenset[int]:
        """Indices of the episodes that are trained."""
        episodes = sorted(set(units.episode[units.counts].tolist()))
        rewards = np.array([mean(units.reward[units.counts & (units.episode == each)]) for each in episodes])
        return frozenset(episodes[n] for n in max_variance(rewards, self.keep))


@dataclass(frozen=True, kw_only=True, slots=True)
class OfSubset:
    """Another Credit that sees only the units of the chosen episodes: the others get 0 and enter no baseline."""

    subset: MaxVariance
    credit: Credit

    def __post_init__(self) -> None:
        check_part("OfSubset.subset", self.subset, MaxVariance)
        check_part("OfSubset.credit", self.credit, Credit)

    def group(self, units: UnitTable) -> Array:
        return self.credit.group(self._of(units))

    def batch(self, units: Sequence[UnitTable], advantages: Sequence[Array]) -> list[Array]:
        return self.credit.batch([self._of(each) for each in units], advantages)

    def narrowed(self, units: UnitTable) -> UnitTable:
        return narrowed(self.credit, self._of(units))

    def _of(self, units: UnitTable) -> UnitTable:
        chosen = self.subset.chosen(units)
        inside = np.array([int(each) in chosen for each in units.episode], np.bool_)
        return replace(units, counts=units.counts & inside)


def max_variance(values: Array, count: int) -> list[int]:
    """Places of ``count`` values with the largest variance, in O(n log n): the best choice always is the i lowest and
    the count - i highest for some i (the paper's theorem 1), and running sums give each i's variance at once. Of
    equally good ones that with the fewest low values."""
    if len(values) <= count:
        return list(range(len(values)))
    order = np.argsort(values, kind="stable")
    ranked = values[order].astype(np.float64)
    # About their middle: far from 0 the squares of the values would swallow their differences (F40).
    ranked = ranked / scale_of(ranked)
    ranked = ranked - ranked[len(ranked) // 2]
    low = np.concatenate([[0.0], np.cumsum(ranked)])
    low_squares = np.concatenate([[0.0], np.cumsum(ranked**2)])
    lowest = np.arange(count + 1)
    highest = len(ranked) - (count - lowest)
    sums = low[lowest] + low[-1] - low[highest]
    squares = low_squares[lowest] + low_squares[-1] - low_squares[highest]
    best = int(np.argmax(squares - sums**2 / count))
    return sorted(int(place) for place in (*order[:best], *order[highest[best] :]))
