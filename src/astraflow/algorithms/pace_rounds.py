"""Paces that keep policies together, for comparison with none: what other systems do, in the same code.

A round is one step of every policy that still has steps to do; who is behind has the lowest version. Only who is
behind may step, and groups are admitted for them alone, so that no policy ever waits for one that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from astraflow.algorithms.base import Pace, PolicyRoom
from astraflow.algorithms.pace import has_room


@dataclass(frozen=True, kw_only=True, slots=True)
class Barrier:
    """Asynchronous, but all policies advance together: nobody begins a step before all have ended the one before."""

    def may_admit(self, rooms: dict[str, PolicyRoom]) -> bool:
        return any(has_room(room) for room in behind(rooms).values())

    def may_step(self, policy: str, rooms: dict[str, PolicyRoom]) -> bool:
        return policy in behind(rooms)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sync:
    """Generate the whole round, then train, then generate with the new weights: what colocated systems do.

    No group is admitted while a policy trains, and no policy trains before every one of the round has its batch.
    """

    def may_admit(self, rooms: dict[str, PolicyRoom]) -> bool:
        if any(room.batched_groups for room in _hungry(rooms)):
            return False
        return any(has_room(room, ahead=0) for room in behind(rooms).values())

    def may_step(self, policy: str, rooms: dict[str, PolicyRoom]) -> bool:
        late = behind(rooms)
        return policy in late and all(_is_fed(room) for room in late.values())


def behind(rooms: dict[str, PolicyRoom]) -> dict[str, PolicyRoom]:
    """The policies of the current round that have not stepped in it yet."""
    version = min((room.version for room in _hungry(rooms)), default=0)
    return {name: room for name, room in rooms.items() if room.steps_left > 0 and room.version == version}


def _hungry(rooms: dict[str, PolicyRoom]) -> Iterable[PolicyRoom]:
    return (room for room in rooms.values() if room.steps_left > 0)


def _is_fed(room: PolicyRoom) -> bool:
    """Its batch is there, or can be cut: what is still open does not count."""
    return not has_room(replace(room, open_groups=0), ahead=0)


SCHEDULES: dict[str, Callable[[], Pace]] = {"barrier": Barrier, "sync": Sync}
"""``Recipe.schedule`` → the Pace that it stands for; ``async`` leaves the pipeline's own."""
