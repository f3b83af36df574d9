"""May another group start? Optimisations only: they save episodes that would go stale; the cut is what guarantees."""

from __future__ import annotations

from dataclasses import dataclass

from astraflow.algorithms.base import PolicyRoom
from astraflow.algorithms.checks import check_at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundedStaleness:
    """As long as any trainable policy has room: the hungriest one sets the pace, what others cannot use is surplus.

    A policy has room while fewer than (max_staleness + 1) × groups_per_batch groups are alive for it (open, kept or in
    a batch), and no more than its steps left need, not counting those that were overtaken: the end of a run does not
    wait for its slowest episodes. Proof that a group then need not go stale: at most that many are served before it,
    the last of them ``max_staleness`` steps after it was opened.
    """

    ahead: int | None = None
    """Batches that may be under way beyond the next one; None: ``max_staleness``, which is also the most."""

    def __post_init__(self) -> None:
        _check_ahead(self.ahead)

    def may_admit(self, rooms: dict[str, PolicyRoom]) -> bool:
        return any(has_room(room, ahead=self.ahead) for room in rooms.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class AllHaveRoom:
    """Only when every policy that still has steps to do has room: nothing is surplus, the slowest sets the pace."""

    ahead: int | None = None

    def __post_init__(self) -> None:
        _check_ahead(self.ahead)

    def may_admit(self, rooms: dict[str, PolicyRoom]) -> bool:
        hungry = [room for room in rooms.values() if room.steps_left > 0]
        return bool(hungry) and all(has_room(room, ahead=self.ahead) for room in hungry)


@dataclass(frozen=True, kw_only=True, slots=True)
class OnPolicy:
    """Strictly on-policy: no group starts while any policy has a batch out, and then only so many as its next batch
    still needs. Every token of a batch is of the version that its step starts from, whatever ``max_staleness`` allows,
    unless a worker is slow to load. With ``max_staleness=0`` the cut guarantees it, and this wastes no episode on it.
    """

    def may_admit(self, rooms: dict[str, PolicyRoom]) -> bool:
        hungry = [room for room in rooms.values() if room.steps_left > 0]
        if any(room.batched_groups for room in hungry):
            return False
        return any(has_room(room, ahead=0) for room in hungry)


def has_room(room: PolicyRoom, *, ahead: int | None = None) -> bool:
    """Alive groups below what can be served before it goes stale, and those to count on below what the run needs."""
    alive = room.open_groups + room.kept_groups + room.batched_groups
    batches = room.max_staleness if ahead is None else min(ahead, room.max_staleness)
    fresh = room.groups_per_batch - room.replayed_groups
    return alive < (batches + 1) * fresh and alive - room.overtaken_groups < room.steps_left * fresh


def _check_ahead(ahead: int | None) -> None:
    check_at_least("ahead", ahead, 0, of=" batches", orelse=" or None (max_staleness)")
