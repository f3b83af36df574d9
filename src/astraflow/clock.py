"""Time as a value. Decisions take ``now``; only shells hold a Clock, so that the simulator can own time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds, never going back, of unknown origin."""

    def wall(self) -> float:
        """Seconds since 1970 by this machine: for people to read, never for a decision."""


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
