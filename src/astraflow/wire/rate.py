"""A limit on bytes a second, shared by every transfer that is given it.

The leaky bucket as a meter (GCRA; ITU-T I.371, 2004): each piece moves the time at which the line is free again by
size / rate; who comes before that time waits for it. A quiet line saves up at most ``BURST_S`` of its rate.
"""

from __future__ import annotations

import asyncio

from astraflow.clock import Clock, SystemClock
from astraflow.errors import ConfigError

BURST_S = 0.1
PIECE_S = 0.25
"""A piece is at most so many seconds of the rate: others get their turn, and no read looks like a silent line."""
SMALLEST_PIECE_BYTES = 1 << 12
SLOWEST_BYTES_PER_S = 1 << 10


class ByteRate:
    """``take`` with each piece; the order of callers is their order of asking."""

    def __init__(self, bytes_per_s: float, *, clock: Clock | None = None) -> None:
        if not SLOWEST_BYTES_PER_S <= bytes_per_s < float("inf"):
            raise ConfigError(f"a rate of weights must be in [{SLOWEST_BYTES_PER_S}, inf) bytes/s, found {bytes_per_s}")
        self.bytes_per_s = bytes_per_s
        self._clock = clock or SystemClock()
        self._free_at = float("-inf")

    def piece_bytes(self, most: int) -> int:
        """How much to send or read at once, at most ``most``."""
        return max(SMALLEST_PIECE_BYTES, min(most, int(self.bytes_per_s * PIECE_S)))

    def reserve(self, size: int, now: float) -> float:
        """Book ``size`` bytes; seconds until the line has carried them."""
        begins = max(self._free_at, now - BURST_S)
        self._free_at = begins + size / self.bytes_per_s
        return max(0.0, self._free_at - now)

    async def take(self, size: int) -> None:
        """Wait until the line has carried ``size`` bytes more."""
        await asyncio.sleep(self.reserve(size, self._clock.monotonic()))


def rate_of_mbit(mbit_per_s: float | None, what: str) -> ByteRate | None:
    """From a setting in Mbit/s; None: no limit. ConfigError names the setting."""
    if mbit_per_s is None:
        return None
    if not 0.01 <= mbit_per_s <= 1e6:
        raise ConfigError(f"{what} must be in [0.01, 1000000] Mbit/s, found {mbit_per_s}")
    return ByteRate(mbit_per_s * 125_000.0)
