"""Train on it? None keeps; a reason drops and is the metric's name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from astraflow.algorithms.base import GroupSummary, UnitTable
from astraflow.types import Array, Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class DropZeroVariance:
    """Drops a group without signal: no unit with an advantage has a key whose rewards differ.

    Rewards are compared exactly, never by their deviation (F34). A key that a single episode played has nothing to be
    compared with: its advantage, if any, was given on purpose (``Returns``) and counts as signal.
    """

    def verdict(self, summary: GroupSummary, advantages: Array) -> str | None:
        units = summary.units
        informative = np.array([_informative(units, key) for key in units.baseline_key], np.bool_)
        return None if np.any(informative & units.counts & (advantages != 0)) else "zero_variance"


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


def _informative(units: UnitTable, key: str) -> bool:
    rows = units.counts & np.array([each == key for each in units.baseline_key], np.bool_)
    rewards = units.reward[rows]
    return len(rewards) > 0 and (len(set(units.episode[rows].tolist())) == 1 or bool(rewards.min() != rewards.max()))
