"""A Pace that keeps data waiting on purpose, so that what is trained is always equally old: to measure what age costs.

The queue is a delay line of ``lag + 1`` batches. Every version samples one batch and every step takes the oldest:

    version that samples     0 0 0 0 | 1 2 3 …        (lag 3: version 0 fills the line)
    step, by its version     0 1 2 3 | 4 5 6 …        ages 0 1 2 | 3 3 3 …
"""

from __future__ import annotations

from dataclasses import dataclass

from astraflow.algorithms.base import PolicyRoom
from astraflow.algorithms.checks import check_at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldStaleness:
    """Steps of version v train what version v - ``lag`` sampled, and of the first ``lag`` steps what version 0 did.

    Holds as long as the workers sample with the newest version, Select serves oldest versions first, ``max_staleness``
    allows the lag and every step makes a version; a batch without signal makes none, and what follows it is one version
    younger.
    """

    lag: int

    def __post_init__(self) -> None:
        check_at_least("HeldStaleness.lag", self.lag, 0, of=" versions")

    def may_admit(self, rooms: dict[str, PolicyRoom]) -> bool:
        """Nothing while a batch is out: what it makes is the version that must sample next."""
        return any(
            not room.batched_groups and room.open_groups + room.kept_groups < self._line(room)
            for room in rooms.values()
        )

    def may_step(self, policy: str, rooms: dict[str, PolicyRoom]) -> bool:
        """Only with a full line: then the current version has sampled all that it is to sample."""
        room = rooms[policy]
        return not room.open_groups and room.kept_groups >= self._line(room)

    def _line(self, room: PolicyRoom) -> int:
        """Groups that wait; fewer at the end, when no more versions will need them."""
        return min(self.lag + 1, room.steps_left) * room.groups_per_batch
