"""Supervised rows in the batches of reinforcement: a fixed share, so that the mix never drifts."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from astraflow.algorithms.base import ReadyGroup, Select, State, Stateful
from astraflow.algorithms.select import check_select, exact_share

GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it fill [0, 1) evenly, also every second or third of them: policies that take turns get equal shares."""


class WithSupervised:
    """``share`` of the groups is supervised, oldest first; the others are picked by ``select``.

    Where it is no whole number of a batch's groups, batches get the number below or above it, so that over batches the
    share is right: of 2 groups, a quarter is one in every second batch.
    A batch is always full. Supervised groups that are missing are made up for by others. Where others are missing it
    waits for them, unless none is open: the queue is then full of supervised groups (Curate gives more of them than
    ``share``), and waiting would never end. Which loss each row takes is its kind's.
    """

    def __init__(self, select: Select, *, share: float | str | Fraction) -> None:
        self._share = exact_share(share)
        check_select("WithSupervised", select)
        self._select = select
        self._batches = 0

    def pick(self, ready: Sequence[ReadyGroup], *, need: int, oldest_open: int | None) -> list[int]:
        supervised = sorted((each for each in ready if is_supervised(each)), key=lambda each: each.arrival)
        others = [each for each in ready if not is_supervised(each)]
        wanted = min(self._wanted(need), len(supervised))
        if oldest_open is None:
            wanted = max(wanted, min(need - len(others), len(supervised)))
        picked = [each.group for each in supervised[:wanted]]
        if wanted < need:
            rest = self._select.pick(others, need=need - wanted, oldest_open=oldest_open)
            picked = [*rest, *picked] if rest else []
        self._batches += bool(picked)
        return picked

    def _wanted(self, need: int) -> int:
        """``need * share``, rounded up in as many of the batches as its fraction says."""
        exact = need * self._share
        whole = int(exact)
        return whole + ((self._batches + 1) * GOLDEN % 1 < exact - whole)

    def state_dict(self) -> State:
        inner = self._select.state_dict() if isinstance(self._select, Stateful) else None
        return {"batches": self._batches, "select": inner}

    def load_state_dict(self, state: State) -> None:
        self._batches = int(state.get("batches", 0))  # older states do not count them
        if isinstance(self._select, Stateful):
            self._select.load_state_dict(state["select"])


def is_supervised(group: ReadyGroup) -> bool:
    """No version sampled anything of it."""
    return group.min_version is None
