"""Solved tasks leave the walk; now and then one of them is played again, to see whether it still is."""

from __future__ import annotations

from astraflow.algorithms.base import Admission, GroupSummary, State
from astraflow.algorithms.checks import check_at_least, check_share, is_number
from astraflow.algorithms.curate.pool import Pool, sparse, unsparse
from astraflow.algorithms.curate.rewards import Rewards
from astraflow.errors import ConfigError
from astraflow.tasks.base import TaskSource


class FilterSolved:
    """A task whose success was at least ``solved_at`` in ``rounds`` groups in a row counts as solved and is skipped.

    With probability ``probe`` the next group is of a solved task instead, the one that was not played for longest
    (the pool of easy problems of MiMo, 2025, arXiv 2505.07608: 10 %). One that is not solved in a probe walks again.
    When all are solved there are only probes.
    """

    def __init__(
        self,
        tasks: TaskSource,
        *,
        group_size: int,
        seed: int = 0,
        reward_range: tuple[float, float] | None = None,
        policy: str = "",
        solved_at: float = 1.0,
        rounds: int = 1,
        probe: float = 0.1,
    ) -> None:
        if not (is_number(solved_at) and 0 < solved_at <= 1):
            raise ConfigError(f"FilterSolved.solved_at must be in (0, 1], found {solved_at}")
        check_at_least("FilterSolved.rounds", rounds, 1)
        check_share("FilterSolved.probe", probe)
        self._pool = Pool("FilterSolved", tasks, group_size=group_size, seed=seed)
        self._rewards = Rewards("FilterSolved", reward_range, policy)
        self._solved_at = solved_at
        self._rounds = rounds
        self._probe = probe
        self._position = 0
        self._admitted = 0
        self._streak: dict[int, int] = {}
        """Place → solved groups in a row, of those that are not solved yet."""
        self._solved: dict[int, int] = {}
        """Place → ``_admitted`` when it was last played or solved, the longest ago first."""

    @property
    def groups(self) -> None:
        """For ever."""
        return None

    @property
    def size(self) -> int:
        return self._pool.size

    @property
    def solved(self) -> int:
        """Tasks that are left out at the moment."""
        return len(self._solved)

    def next(self) -> Admission:
        point = self._pool.chance(self._admitted, 2)
        self._admitted += 1
        if self._solved and (len(self._solved) == self._pool.size or point < self._probe):
            place = next(iter(self._solved))
            del self._solved[place]
            self._solved[place] = self._admitted
            return self._pool.admit(place)
        while True:
            place = self._pool.walk(self._position)
            self._position += 1
            if place not in self._solved:
                return self._pool.admit(place)

    def observe(self, summary: GroupSummary) -> None:
        judged = self._rewards.judge(summary, self._pool)
        if judged is None:
            return
        place, success = judged
        if success < self._solved_at:
            self._streak.pop(place, None)
            self._solved.pop(place, None)
        elif place not in self._solved:
            self._streak[place] = self._streak.get(place, 0) + 1
            if self._streak[place] >= self._rounds:
                del self._streak[place]
                self._solved[place] = self._admitted

    def state_dict(self) -> State:
        learned = {
            "rewards": self._rewards.state_dict(),
            "admitted": self._admitted,
            "streak": sparse(self._streak, "int64"),
            "solved": sparse(self._solved, "int64"),
        }
        return self._pool.state(self._position, learned)

    def load_state_dict(self, state: State) -> None:
        learned = self._pool.learned(state)
        self._position = int(state["position"])
        self._admitted = int(learned["admitted"]) if learned else 0
        self._streak = unsparse(learned["streak"]) if learned else {}
        self._solved = unsparse(learned["solved"]) if learned else {}
        if learned:
            self._rewards.load_state_dict(learned["rewards"])
