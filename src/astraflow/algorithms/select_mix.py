"""Supervised rows in the batches of reinforcement: a fixed share of each, so that the mix never drifts."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from astraflow.algorithms.base import ReadyGroup, Select, State, Stateful
from astraflow.algorithms.select import refuse_replay, replay_count


class WithSupervised:
    """``share`` of each batch's groups (half up) is supervised, oldest first; the others are picked by ``select``.

    A batch is always full. Supervised groups that are missing are made up for by others. Where others are missing it
    waits for them, unless none is open: the queue is then full of supervised groups (Curate gives more of them than
    ``share``), and waiting would never end. Which loss each row takes is its kind's.
    """

    def __init__(self, select: Select, *, share: float | str | Fraction) -> None:
        replay_count(1, share)
        refuse_replay("WithSupervised", select)
        self._select = select
        self._share = share

    def pick(self, ready: Sequence[ReadyGroup], *, need: int, oldest_open: int | None) -> list[int]:
        supervised = sorted((each for each in ready if is_supervised(each)), key=lambda each: each.arrival)
        others = [each for each in ready if not is_supervised(each)]
        wanted = min(replay_count(need, self._share), len(supervised))
        if oldest_open is None:
            wanted = max(wanted, min(need - len(others), len(supervised)))
        picked = [each.group for each in supervised[:wanted]]
        if wanted == need:
            return picked
        rest = self._select.pick(others, need=need - wanted, oldest_open=oldest_open)
        return [*rest, *picked] if rest else []

    def state_dict(self) -> State:
        return {"select": self._select.state_dict() if isinstance(self._select, Stateful) else None}

    def load_state_dict(self, state: State) -> None:
        if isinstance(self._select, Stateful):
            self._select.load_state_dict(state["select"])


def is_supervised(group: ReadyGroup) -> bool:
    """No version sampled anything of it."""
    return group.min_version is None
