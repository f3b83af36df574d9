"""Whether a process has done what it is there for since it was started: a death before that is a *quick* one.

| process  | useful work                                        |
| -------- | -------------------------------------------------- |
| rollout  | an episode of its own was played to an outcome     |
| trainer  | a step of its policy was committed                 |
| dataflow | an episode was stored                              |
"""

from __future__ import annotations

from dataclasses import dataclass

from astraflow.wire.calls import Role
from astraflow.wire.messages import StatusReply

OUTCOMES = ("episode/completed", "episode/truncated")


@dataclass(kw_only=True, slots=True)
class Useful:
    """Of one started process. ``see`` every status; what grows while it lives, it has done."""

    role: Role
    name: str
    """As dataflow knows it."""
    policy: str | None
    done: bool = False
    _lowest: float | None = None

    def see(self, status: StatusReply) -> None:
        progress = self._progress(status)
        if progress is None:
            return
        # The lowest, not the first: a trainer that resumes further back first takes the version down.
        self._lowest = progress if self._lowest is None else min(self._lowest, progress)
        self.done = self.done or progress > self._lowest

    def _progress(self, status: StatusReply) -> float | None:
        if self.role is Role.TRAINER:
            return next((each.version for each in status.policies if each.policy == self.policy), None)
        if self.role is Role.OPERATOR:
            return status.episodes.get("done", 0)
        self._lowest = 0.0
        for each in status.components:
            if (each.component, each.name) == ("rollout", self.name):
                # Its own report comes with a heartbeat: what it played in its last seconds, only dataflow knows.
                return max(float(each.played), sum(each.report.metrics.get(outcome, 0.0) for outcome in OUTCOMES))
        return None
