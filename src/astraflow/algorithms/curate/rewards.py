"""What the rewards of a group say of its task: solved, never solved, between, and whether there was any signal."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from astraflow.algorithms.base import GroupSummary, State
from astraflow.algorithms.checks import is_number
from astraflow.algorithms.curate.pool import Pool
from astraflow.errors import ConfigError
from astraflow.types import Array


class Kind(IntEnum):
    """Of a group whose rewards are all equal."""

    OTHER = 0
    """Neither end of the range, or no range is known yet."""
    EASY = 1
    """All at the top of the range."""
    HARD = 2
    """All at the bottom."""


class Rewards:
    """One policy's rewards, on the scale of ``reward_range``; None: of the lowest and the highest seen so far.

    ``policy`` empty: that of the first group that is looked at. Never a fixed 0.5: rewards of {-1, 1} or {0, 0.4} have
    their own ends (F66).
    """

    def __init__(self, who: str, reward_range: tuple[float, float] | None, policy: str) -> None:
        if reward_range is not None:
            is_pair = isinstance(reward_range, tuple | list) and len(reward_range) == 2
            ends = [end for end in reward_range if is_number(end) and abs(end) < float("inf")] if is_pair else []
            if len(ends) < 2 or not ends[0] < ends[1]:
                raise ConfigError(
                    f"{who}.reward_range must be (low, high), both finite and low < high, found {reward_range!r}"
                )
        self._declared = reward_range
        self._seen: tuple[float, float] | None = None
        self._policy = policy

    def look(self, summary: GroupSummary) -> Array | None:
        """float64: what counts; None: nothing does, or it is another policy's. From here on its range is known."""
        if not self._policy:
            self._policy = summary.policy
        rewards = summary.units.reward[summary.units.counts]
        if summary.policy != self._policy or not len(rewards):
            return None
        low, high = float(rewards.min()), float(rewards.max())
        if self._seen is not None:
            low, high = min(low, self._seen[0]), max(high, self._seen[1])
        self._seen = (low, high)
        return np.asarray(rewards, np.float64)

    @property
    def range(self) -> tuple[float, float] | None:
        """None: nothing tells good from bad yet."""
        found = self._declared or self._seen
        return None if found is None or found[0] == found[1] else found

    def kind(self, rewards: Array) -> Kind:
        """Of rewards that are all equal. Compared exactly."""
        if self.range is None:
            return Kind.OTHER
        low, high = self.range
        if float(rewards.min()) >= high:
            return Kind.EASY
        return Kind.HARD if float(rewards.max()) <= low else Kind.OTHER

    def success(self, rewards: Array) -> float | None:
        """Mean reward as a share of the range, in [0, 1]; None: no range is known yet."""
        if self.range is None:
            return None
        low, high = self.range
        # Halves, so that a range of 1e308 on either side does not overflow.
        share = (rewards / 2 - low / 2) / (high / 2 - low / 2)
        return float(np.mean(np.clip(share, 0.0, 1.0)))

    def judge(self, summary: GroupSummary, pool: Pool) -> tuple[int, float] | None:
        """Place and success of a group's task; None: another's task, another policy's, or nothing in it counts."""
        place = pool.place(summary.task)
        rewards = None if place is None else self.look(summary)
        success = None if rewards is None else self.success(rewards)
        return None if place is None or success is None else (place, success)

    def state_dict(self) -> State:
        return {"policy": self._policy, "seen": None if self._seen is None else list(self._seen)}

    def load_state_dict(self, state: State) -> None:
        self._policy = str(state["policy"])
        self._seen = None if state["seen"] is None else (float(state["seen"][0]), float(state["seen"][1]))


def has_signal(summary: GroupSummary) -> bool:
    """Whether rewards that are compared with each other differ. Exactly, never by their deviation (F34)."""
    units = summary.units
    ends: dict[str, tuple[float, float]] = {}
    for key, reward, counts in zip(units.baseline_key, units.reward.tolist(), units.counts.tolist(), strict=True):
        if counts:
            low, high = ends.get(key, (reward, reward))
            ends[key] = (min(low, reward), max(high, reward))
    return any(low != high for low, high in ends.values())
