"""Train on it? None keeps; a reason drops and is the metric's name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from astraflow.algorithms.base import GroupSummary, UnitTable
from astraflow.types import Array, Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class DropZeroVariance:
    """Drops a group without signal: ``zero_variance``, or ``no_baseline`` where nobody had anyone to be compared with.

    Signal is a unit with an advantage whose key has different rewards. They are compared exactly, never by their
    deviation (F34). A key that a single episode played has nothing to be compared with: its advantage, if any, was
    given on purpose (``Returns``) and counts as signal.
    """

    def verdict(self, summary: GroupSummary, advantages: Array) -> str | None:
        units = summary.units
        alone = {key: _episodes(units, key) < 2 for key in set(units.baseline_key)}
        informative = np.array([alone[key] or _differ(units, key) for key in units.baseline_key], np.bool_)
        if np.any(informative & units.counts & (advantages != 0)):
            return None
        return "no_baseline" if all(alone.values()) else "zero_variance"


@dataclass(frozen=True, kw_only=True, slots=True)
class DropNoAdvantage:
    """Drops a group whose advantages are all exactly 0 (``zero_advantage``), whatever its rewards are: for a Credit
    that compares something else than the rewards of one key (shaped ones, returns, states)."""

    def verdict(self, summary: GroupSummary, advantages: Array) -> str | None:
        return None if np.any(advantages[summary.units.counts]) else "zero_advantage"


@dataclass(frozen=True, kw_only=True, slots=True)
class DropTruncated:
    """Samples of truncated episodes take no gradient, their rewards stay in the baseline; none left drops the group."""

    def verdict(self, summary: GroupSummary, advantages: Array) -> str | None:
        left = [outcome for outcome, counts in zip(summary.units.outcome, summary.units.counts, strict=True) if counts]
        return None if Outcome.COMPLETED in left else "truncated"

    def mask(self, summary: GroupSummary) -> dict[str, str]:
        units = summary.units
        return {
            sample: "truncated"
            for sample, outcome in zip(units.sample_id, units.outcome, strict=True)
            if outcome is Outcome.TRUNCATED
        }


def _rows(units: UnitTable, key: str) -> Array:
    return units.counts & np.array([each == key for each in units.baseline_key], np.bool_)


def _episodes(units: UnitTable, key: str) -> int:
    return len(set(units.episode[_rows(units, key)].tolist()))


def _differ(units: UnitTable, key: str) -> bool:
    rewards = units.reward[_rows(units, key)]
    return len(rewards) > 0 and bool(rewards.min() != rewards.max())
