"""The less a task is solved, the more often it comes."""

from __future__ import annotations

import numpy as np

from astraflow.algorithms.base import Admission, GroupSummary, State
from astraflow.algorithms.curate.pool import Pool, check_at_least, check_share, draw, sparse, unsparse
from astraflow.algorithms.curate.rewards import Rewards
from astraflow.errors import ConfigError
from astraflow.tasks.base import TaskSource
from astraflow.types import Array


class Prioritised:
    """Draws with probability ∝ 1 − success, the tracked success rate of the task (Kimi k1.5, 2025, arXiv 2501.12599).

    A task that was never played has success ``unseen``. With all of them solved every task is drawn alike.
    """

    def __init__(
        self,
        tasks: TaskSource,
        *,
        group_size: int,
        seed: int = 0,
        reward_range: tuple[float, float] | None = None,
        policy: str = "",
        unseen: float = 0.0,
        memory: float = 0.5,
        least: float = 0.0,
        rest: int = 0,
    ) -> None:
        """``memory``: what of the earlier estimate stays at each new one; 0: the last group alone. ``least``: no
        weight is below it, so that forgetting is noticed (0 is as published). ``rest``: groups of others before a task
        comes again; at most all but one."""
        check_share("Prioritised.unseen", unseen)
        if not 0 <= memory < 1:
            raise ConfigError(f"Prioritised.memory must be in [0, 1), found {memory}")
        check_share("Prioritised.least", least)
        check_at_least("Prioritised.rest", rest, 0)
        self._pool = Pool("Prioritised", tasks, group_size=group_size, seed=seed)
        self._rewards = Rewards("Prioritised", reward_range, policy)
        self._unseen = unseen
        self._memory = memory
        self._least = least
        self._resting = Resting(rest)
        self._position = 0
        self._success: dict[int, float] = {}

    @property
    def groups(self) -> None:
        """For ever."""
        return None

    @property
    def size(self) -> int:
        return self._pool.size

    def weights(self) -> Array:
        """float64 [N], before rests: the probability of each task but for a factor."""
        success = np.full(self._pool.size, self._unseen)
        success[list(self._success)] = list(self._success.values())
        return np.asarray(np.maximum(1 - success, self._least))

    def next(self) -> Admission:
        place = draw(self._resting.of(self.weights()), self._pool.chance(self._position))
        self._position += 1
        self._resting.add(place, self._pool.size)
        return self._pool.admit(place)

    def observe(self, summary: GroupSummary) -> None:
        place = self._pool.place(summary.task)
        rewards = None if place is None else self._rewards.look(summary)
        success = None if rewards is None else self._rewards.success(rewards)
        if place is None or success is None:
            return
        before = self._success.get(place, success)
        self._success[place] = self._memory * before + (1 - self._memory) * success

    def state_dict(self) -> State:
        learned = {
            "rewards": self._rewards.state_dict(),
            "success": sparse(self._success, "float64"),
            "resting": self._resting.state(),
        }
        return self._pool.state(self._position, learned)

    def load_state_dict(self, state: State) -> None:
        learned = self._pool.learned(state)
        self._position = int(state["position"])
        self._success = unsparse(learned["success"]) if learned else {}
        self._resting.load(learned["resting"] if learned else [])
        if learned:
            self._rewards.load_state_dict(learned["rewards"])


class Resting:
    """The places that came last: they are left out of a draw while there are others."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._places: list[int] = []

    def of(self, weights: Array) -> Array:
        """The weights with those at rest 0; if nothing else has any, every other place alike."""
        if not self._places:
            return weights
        awake = np.ones(len(weights), np.bool_)
        awake[self._places] = False
        left = np.where(awake, weights, 0.0)
        return left if left.any() else awake.astype(np.float64)

    def add(self, place: int, size: int) -> None:
        count = min(self._count, size - 1)
        self._places = [*self._places, place][-count:] if count else []

    def state(self) -> list[int]:
        return list(self._places)

    def load(self, places: list[int]) -> None:
        self._places = [int(place) for place in places]
