"""One fault that was done, and when it was noticed and over, read from what the ledger's events show. Pure.

| component | recovered with                                                      |
| --------- | ------------------------------------------------------------------- |
| rollout   | the first accepted episode of its own                               |
| trainer   | its next commit                                                     |
| dataflow  | the first accepted episode of anybody                               |

Noticed is a death: a component that is slowed or cut off for a while has none, nor has a trainer beside which a second
one was started, for it is refused while it lives, and ends by itself. While dataflow is dead, stopped or
hears nobody, nothing can be noticed: it then counts from when it is back, as its terms for all others do.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from astraflow.run.chaos.plan import RESTARTED, Component, Fault, Kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Sighting:
    """An event of the ledger and when it was seen."""

    at: float
    kind: str
    """``done``, ``committed``, ``resumed``, ``dead``, ``joined``, ``dataflow_started`` or ``dataflow_back``"""
    name: str = ""
    """``done``: the worker; ``committed``, ``resumed``: the policy; ``dead``, ``joined``: the component."""


@dataclass(kw_only=True, slots=True)
class Injury:
    """``see`` every sighting in order; ``restarted`` when the supervisor starts the successor."""

    fault: Fault
    post: str
    name: str
    """Of the victim, as dataflow knows it; a trainer's is its policy."""
    at: float
    """Of the fault."""
    healed_at: float | None = None
    """SIGCONT, or the way is free again: recovery counts from here."""
    noticed_at: float | None = None
    successor: str | None = None
    successor_at: float | None = None
    recovered_at: float | None = None
    _returned: bool = False
    """The successor registered: from now on what is done is its work."""
    _watched_since: float = 0.0
    """Since when dataflow is there again to notice it, if that was hurt too."""

    @property
    def deadly(self) -> bool:
        return self.fault.kind in RESTARTED

    @property
    def recovery_s(self) -> float | None:
        since = self.at if self.deadly else self.healed_at
        return None if since is None or self.recovered_at is None else self.recovered_at - since

    @property
    def cold_start_s(self) -> float | None:
        """From the start of the successor to its first useful work."""
        known = self.successor_at is not None and self.recovered_at is not None
        return self.recovered_at - self.successor_at if known else None  # type: ignore[operator]

    @property
    def detect_s(self) -> float | None:
        return None if self.noticed_at is None else self.noticed_at - max(self.at, self._watched_since)

    def restarted(self, name: str, at: float) -> None:
        self.successor, self.successor_at = name, at
        self._returned = False
        if self.fault.component is Component.DATAFLOW:
            self._notice(at)

    def see(self, seen: Sighting) -> None:
        if seen.at < self.at:
            return
        if seen.kind in ("dataflow_started", "dataflow_back") and self.noticed_at is None:
            self._watched_since = seen.at
        if self._may_be_missed and seen.kind in ("dead", "joined") and seen.name == self.name:
            self._notice(seen.at)
        if seen.kind == self._comes_back_by and self.successor is not None:
            self._returned = self._returned or seen.name in ("", self.name)
        if self.recovered_at is None and self._is_recovery(seen):
            self.recovered_at = seen.at

    @property
    def _may_be_missed(self) -> bool:
        """A paused component until it works again: a later death is another fault's."""
        dies = self.deadly and self.fault.kind is not Kind.SECOND
        return dies or (self.fault.kind is Kind.STOP and self.recovered_at is None)

    def _notice(self, at: float) -> None:
        self.noticed_at = at if self.noticed_at is None else self.noticed_at

    @property
    def _comes_back_by(self) -> str:
        return "resumed" if self.fault.component is Component.TRAINER else "dataflow_started"

    def _is_recovery(self, seen: Sighting) -> bool:
        component = self.fault.component
        if seen.kind != ("committed" if component is Component.TRAINER else "done"):
            return False
        if component is Component.ROLLOUT and self.successor is not None:
            return seen.name == self.successor
        if component is not Component.DATAFLOW and seen.name != self.name:
            return False
        if self.successor is not None:
            return self._returned
        return not self.deadly and self.healed_at is not None and seen.at >= self.healed_at
