"""The less a task is solved, the more often it comes."""

from __future__ import annotations

import numpy as np

from astraflow.algorithms.base import Admission, GroupSummary, State
from astraflow.algorithms.checks import check_share, is_number
from astraflow.algorithms.curate.draws import Draws
from astraflow.algorithms.curate.pool import Pool, sparse, unsparse
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
        if not (is_number(memory) and 0 <= memory < 1):
            raise ConfigError(f"Prioritised.memory must be in [0, 1), found {memory!r}")
        check_share("Prioritised.least", least)
        self._pool = Pool("Prioritised", tasks, group_size=group_size, seed=seed)
        self._rewards = Rewards("Prioritised", reward_range, policy)
        self._unseen = unseen
        self._memory = memory
        self._least = least
        self._draws = Draws("Prioritised", self._pool, rest=rest)
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
        return self._draws.next(self.weights())

    def observe(self, summary: GroupSummary) -> None:
        judged = self._rewards.judge(summary, self._pool)
        if judged is None:
            return
        place, success = judged
        before = self._success.get(place, success)
        self._success[place] = self._memory * before + (1 - self._memory) * success

    def state_dict(self) -> State:
        return self._draws.state({"rewards": self._rewards.state_dict(), "success": sparse(self._success, "float64")})

    def load_state_dict(self, state: State) -> None:
        learned = self._draws.load(state)
        self._success = unsparse(learned["success"]) if learned else {}
        if learned:
            self._rewards.load_state_dict(learned["rewards"])
