"""Groups that were trained come again beside fresh ones: fewer episodes for as many steps.

The staleness bound holds for them as for all (the sweep at the cut), so that ``max_staleness=0`` replays nothing. Rows
keep their first behaviour log-probs and advantages; ``use`` counts from 1, and (sample_id, use) is trained once.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from astraflow.algorithms.base import ReadyGroup, Select, State, Stateful, StoredGroup
from astraflow.algorithms.checks import check_at_least, is_number
from astraflow.algorithms.select import check_select, exact_share, replay_count
from astraflow.errors import ConfigError
from astraflow.types import Array

ORDERS = ("latest", "uniform", "prioritised")
LAST = -1e9
"""Log-weight of groups without any advantage. Not -inf: among them the noise still decides."""


class WithReplay:
    """``ratio`` of each batch is replayed, the rest picked by ``select``; what the store lacks is made up for by fresh
    groups (F63). At least one group of a batch is fresh, so that the run never lives on its past alone.
    Where ``ratio`` is no whole number of a batch's groups, what rounding leaves is carried to the policy's next batch:
    of 4 groups, .3 is 2 in one batch of five and 1 in the others. What the store lacked is not owed.

    latest        youngest first, then the one that closed last
    uniform       without replacement
    prioritised   without replacement, weight |advantage|^strength x decay^age (after prioritised experience replay,
                  Schaul et al. 2015, arXiv 1511.05952; without its importance weights, as advantages of a group are
                  relative to each other). With strength > 0, groups whose advantages are all 0 come last
    """

    def __init__(
        self,
        select: Select,
        *,
        ratio: float | str | Fraction,
        order: str = "latest",
        replays: int | None = None,
        strength: float = 1.0,
        decay: float = 0.5,
        seed: int = 0,
    ) -> None:
        """``replays``: how often one group may come again; None: until it is too old."""
        self._ratio = exact_share(ratio)
        check_select("WithReplay", select)
        if order not in ORDERS:
            raise ConfigError(f"WithReplay.order must be one of {', '.join(ORDERS)}, found {order!r}")
        check_at_least("WithReplay.replays", replays, 1, orelse=" or None (until too old)")
        if not (is_number(strength) and 0 <= strength < float("inf")):
            raise ConfigError(f"WithReplay.strength must be in [0, inf), found {strength}")
        if not (is_number(decay) and 0 < decay <= 1):
            raise ConfigError(f"WithReplay.decay must be in (0, 1], found {decay}")
        check_at_least("WithReplay.seed", seed, 0)
        self._select = select
        self._order = order
        self._replays = replays
        self._strength = strength
        self._decay = decay
        self._seed = seed
        self._draws = 0
        self._owed: dict[str, Fraction] = {}
        """Policy → groups that rounding has left of its batches so far, in [-1/2, 1/2)."""

    @property
    def fresh(self) -> Select:
        """What picks the fresh groups."""
        return self._select

    def pick(self, ready: Sequence[ReadyGroup], *, need: int, oldest_open: int | None) -> list[int]:
        return self._select.pick(ready, need=need, oldest_open=oldest_open)

    def share(self, stored: Sequence[StoredGroup], *, policy: str, need: int) -> int:
        return min(self._wanted(policy, need), need - 1, len(self._eligible(stored)))

    def pick_with(
        self,
        ready: Sequence[ReadyGroup],
        stored: Sequence[StoredGroup],
        *,
        policy: str,
        need: int,
        oldest_open: int | None,
    ) -> tuple[list[int], list[int]]:
        count = self.share(stored, policy=policy, need=need)
        fresh = self._select.pick(ready, need=need - count, oldest_open=oldest_open)
        if not fresh:
            return [], []
        again = self._choose(self._eligible(stored), count)
        self._draws += 1
        left = self._owed.get(policy, Fraction(0)) + need * self._ratio - self._wanted(policy, need)
        self._owed[policy] = left
        return fresh, [group.group for group in sorted(again, key=lambda each: each.arrival)]

    def state_dict(self) -> State:
        inner = self._select.state_dict() if isinstance(self._select, Stateful) else None
        owed = {policy: str(left) for policy, left in sorted(self._owed.items())}
        return {"draws": self._draws, "owed": owed, "seed": self._seed, "select": inner}

    def load_state_dict(self, state: State) -> None:
        """Raises ConfigError when the seed is not that of the state."""
        if state["seed"] != self._seed:
            raise ConfigError(f"WithReplay.seed changed from {state['seed']} to {self._seed}: restore it")
        self._draws = int(state["draws"])
        # Older states carry nothing on, and do not say it.
        self._owed = {policy: Fraction(left) for policy, left in state.get("owed", {}).items()}
        if isinstance(self._select, Stateful):
            self._select.load_state_dict(state["select"])

    def _wanted(self, policy: str, need: int) -> int:
        return replay_count(need, self._ratio, self._owed.get(policy, Fraction(0)))

    def _eligible(self, stored: Sequence[StoredGroup]) -> list[StoredGroup]:
        return [group for group in stored if self._replays is None or group.uses <= self._replays]

    def _choose(self, stored: list[StoredGroup], count: int) -> list[StoredGroup]:
        if self._order == "latest":
            return sorted(stored, key=lambda each: (each.age, -each.arrival))[:count]
        ranked = sorted(stored, key=lambda each: each.arrival)
        # Gumbel's trick: the largest log-weights plus noise are a draw without replacement.
        noise = np.random.default_rng((self._seed, self._draws)).gumbel(size=len(ranked))
        weights = np.zeros(len(ranked)) if self._order == "uniform" else self._log_weights(ranked)
        best = np.argsort(-(weights + noise), kind="stable")[:count]
        return [ranked[n] for n in best]

    def _log_weights(self, stored: list[StoredGroup]) -> Array:
        advantage = np.array([each.advantage for each in stored], np.float64)
        age = np.array([each.age for each in stored], np.float64)
        size = self._strength * np.log(np.maximum(advantage, 1e-300))
        if self._strength > 0:
            size[advantage == 0] = LAST
        return np.asarray(size + age * np.log(self._decay))
