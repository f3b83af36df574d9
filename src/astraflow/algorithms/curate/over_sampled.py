"""A Pace that opens as many groups as a full batch will take, given how many of them will have a signal."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Protocol, runtime_checkable

from astraflow.algorithms.base import PolicyRoom
from astraflow.algorithms.checks import is_number
from astraflow.errors import ConfigError


@runtime_checkable
class Foresees(Protocol):
    """A Curate that says which share of its groups had a signal of late (``Greso``)."""

    @property
    def signal_share(self) -> float: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class OverSampled:
    """Open at most ``margin`` x missing / (share with signal) groups, where missing is what the kept ones leave free.

    GRESO's adaptive batch size (Zheng et al. 2025, arXiv 2506.02177; margin 1.25 there): the batch is full after one
    round instead of after several, each as long as its longest episode. Without waste exactly what is missing is
    opened. An optimisation, as any Pace: the sweep at the cut is what guarantees the bound.
    """

    curate: Foresees
    """The one of the same pipeline: its state is kept there."""
    margin: float = 1.25
    most: float = 4.0
    """Never more than so many times what is missing, however few have a signal."""

    def __post_init__(self) -> None:
        if not isinstance(self.curate, Foresees):
            raise ConfigError(f"OverSampled.curate must know its signal_share, {type(self.curate).__name__} does not")
        for name, value in (("margin", self.margin), ("most", self.most)):
            if not (is_number(value) and 1 <= value < float("inf")):
                raise ConfigError(f"OverSampled.{name} must be in [1, inf), found {value}")

    def may_admit(self, rooms: dict[str, PolicyRoom]) -> bool:
        return any(room.open_groups < self.wanted(room) for room in rooms.values())

    def wanted(self, room: PolicyRoom) -> int:
        """Groups that should be open, to fill what is missing."""
        fresh = room.groups_per_batch - room.replayed_groups
        missing = min(room.max_staleness + 1, room.steps_left) * fresh - room.kept_groups - room.batched_groups
        share = self.curate.signal_share
        if missing <= 0 or share >= 1:
            return max(0, missing)
        return ceil(missing * min(self.most, self.margin / max(share, self.margin / self.most)))
