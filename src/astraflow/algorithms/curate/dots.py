"""Tasks that the policy solves about half of the time; how hard the unseen ones are is told from similar ones."""

from __future__ import annotations

import numpy as np

from astraflow.algorithms.base import Admission, GroupSummary, State
from astraflow.algorithms.checks import check_above_zero, check_at_least, check_share
from astraflow.algorithms.curate.draws import Draws
from astraflow.algorithms.curate.pool import Pool, sparse, unsparse
from astraflow.algorithms.curate.rewards import Rewards
from astraflow.tasks.base import TaskSource
from astraflow.types import Array


class Dots:
    """DOTS (Sun et al. 2025, arXiv 2506.05316): draws with p ∝ exp(−|d − target| / τ), d = 1 − success, the difficulty.

    d of a task that was played is the one measured last. Of one that was not it is predicted by attention over the
    ``references`` tasks measured last: d = Σ a_i d_i, a = softmax(cosine(x, x_i) / sharpness) of the tasks' feature
    ``feature``. The paper trains an adapter and a calibration for it; here features are taken as they come. Without a
    feature it is the mean of the references; before the first ``refresh`` groups it is ``target``: all are drawn alike.
    References change every ``refresh`` groups, which bounds the work.
    """

    def __init__(
        self,
        tasks: TaskSource,
        *,
        group_size: int,
        seed: int = 0,
        feature: str | None = None,
        reward_range: tuple[float, float] | None = None,
        policy: str = "",
        target: float = 0.5,
        tau: float = 0.1,
        sharpness: float = 0.1,
        references: int = 256,
        refresh: int = 32,
        rest: int = 0,
    ) -> None:
        """``rest``: groups of others before a task comes again; at most all but one."""
        check_share("Dots.target", target)
        check_above_zero("Dots.tau", tau)
        check_above_zero("Dots.sharpness", sharpness)
        check_at_least("Dots.references", references, 1)
        check_at_least("Dots.refresh", refresh, 1)
        self._pool = Pool("Dots", tasks, group_size=group_size, seed=seed)
        if feature is not None:
            self._pool.embed("Dots", feature)
        self._feature = feature
        self._rewards = Rewards("Dots", reward_range, policy)
        self._target = target
        self._tau = tau
        self._sharpness = sharpness
        self._most = references
        self._refresh = refresh
        self._draws = Draws("Dots", self._pool, rest=rest)
        self._measured: dict[int, float] = {}
        """Place → difficulty, the one measured last at the end."""
        self._references: dict[int, float] = {}
        self._since = 0
        """Groups measured since the references changed."""
        self._predicted: Array | None = None

    @property
    def groups(self) -> None:
        """For ever."""
        return None

    @property
    def size(self) -> int:
        return self._pool.size

    def difficulty(self) -> Array:
        """float64 [N], in [0, 1]: measured, or predicted."""
        if self._predicted is None:
            self._predicted = self._predict()
        found = self._predicted.copy()
        found[list(self._measured)] = list(self._measured.values())
        return found

    def weights(self) -> Array:
        """float64 [N], before rests: the probability of each task but for a factor, of the likeliest 1."""
        distance = np.abs(self.difficulty() - self._target)
        # Relative to the nearest, so that a small τ does not make all of them 0.
        return np.asarray(np.exp(-(distance - distance.min()) / self._tau))

    def next(self) -> Admission:
        return self._draws.next(self.weights())

    def observe(self, summary: GroupSummary) -> None:
        judged = self._rewards.judge(summary, self._pool)
        if judged is None:
            return
        place, success = judged
        self._measured.pop(place, None)
        self._measured[place] = 1 - success
        self._since += 1
        if self._since >= self._refresh:
            self._since = 0
            self._references = dict(list(self._measured.items())[-self._most :])
            self._predicted = None

    def _predict(self) -> Array:
        if not self._references:
            return np.full(self._pool.size, self._target)
        difficulty = np.array(list(self._references.values()), np.float64)
        if self._feature is None:
            return np.full(self._pool.size, difficulty.mean())
        scores = self._pool.cosines(list(self._references)) / self._sharpness
        attention = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.asarray(np.clip(attention @ difficulty / attention.sum(axis=1), 0.0, 1.0))

    def state_dict(self) -> State:
        learned = {
            "rewards": self._rewards.state_dict(),
            "measured": sparse(self._measured, "float64"),
            "references": sparse(self._references, "float64"),
            "since": self._since,
        }
        return self._draws.state(learned)

    def load_state_dict(self, state: State) -> None:
        learned = self._draws.load(state)
        self._predicted = None
        self._measured = unsparse(learned["measured"]) if learned else {}
        self._references = unsparse(learned["references"]) if learned else {}
        self._since = int(learned["since"]) if learned else 0
        if learned:
            self._rewards.load_state_dict(learned["rewards"])
