"""A Clock that reads a virtual loop's time: monotonic starts anew per process, wall time may be set wrong."""

from __future__ import annotations

import asyncio


class VirtualClock:
    """One per simulated process. Nothing but a person may ever look at ``wall``: the simulator jumps it at will."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, wall: float = 1_700_000_000.0) -> None:
        self._loop = loop
        self._began = loop.time()
        self._wall = wall

    def monotonic(self) -> float:
        return self._loop.time() - self._began

    def wall(self) -> float:
        return self._wall + self._loop.time()

    def jump_wall(self, seconds: float) -> None:
        """Someone corrected the machine's clock, forwards or backwards."""
        self._wall += seconds


class ManualClock:
    """A Clock that only moves when told to, for unit tests without a loop."""

    def __init__(self, now: float = 0.0, *, wall: float = 1_700_000_000.0) -> None:
        self._now = now
        self._wall = wall

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._wall + self._now

    def advance(self, seconds: float) -> float:
        """Returns the new time."""
        if seconds < 0:
            raise ValueError(f"monotonic time never goes back, found {seconds}")
        self._now += seconds
        return self._now
