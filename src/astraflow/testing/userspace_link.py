"""A line between two hosts, in user space: packets of two TUN devices with delay, rate, loss and cuts.

    python -m astraflow.testing.userspace_link FD FD    one JSON ``Line`` a line on standard input, counters on output

What ``tc netem`` does, where the kernel has none: both ends' TCP is the kernel's own, only the packets wait here.
Ends with its standard input.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import struct
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass

from astraflow.errors import ConfigError

TUN, TUNSETIFF, IFF_TUN, IFF_NO_PI = "/dev/net/tun", 0x400454CA, 0x0001, 0x1000
PACKET_BYTES = 1 << 16
TURN = 64
"""Packets of one end before the other end gets its turn."""
QUEUE_S = 1.0
"""Bytes that wait for their turn at most, in seconds of the line's rate, before packets are dropped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """What a line is like, each way."""

    rtt_s: float = 0.0
    rate_mbit: float | None = None
    """None: as fast as this machine is."""
    loss: float = 0.0
    """Chance that a packet is lost, each way."""
    cut: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rtt_s < 60:
            raise ConfigError(f"Line.rtt_s must be in [0, 60) s, found {self.rtt_s}")
        if self.rate_mbit is not None and not 0 < self.rate_mbit < float("inf"):
            raise ConfigError(f"Line.rate_mbit must be in (0, inf) Mbit/s, found {self.rate_mbit}")
        if not 0 <= self.loss <= 1:
            raise ConfigError(f"Line.loss must be in [0, 1], found {self.loss}")

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


class Way:
    """One direction. Packets leave in the order in which they came."""

    def __init__(self, line: Line, rng: random.Random) -> None:
        self.line = line
        self._rng = rng
        self._free_at = 0.0
        """When the last accepted packet is on its way, by the rate."""
        self._queue: deque[tuple[float, bytes]] = deque()
        self.passed = self.lost = self.overflowed = 0

    def put(self, now: float, packet: bytes) -> None:
        line = self.line
        if line.cut or self._rng.random() < line.loss:
            self.lost += 1
            return
        self._free_at = max(self._free_at, now)
        if line.rate_mbit is not None:
            if self._free_at - now > QUEUE_S:
                self.overflowed += 1
                return
            self._free_at += len(packet) * 8 / (line.rate_mbit * 1e6)
        due = self._free_at + line.rtt_s / 2
        if self._queue and self._queue[-1][0] > due:  # the line has become shorter: nobody overtakes
            due = self._queue[-1][0]
        self._queue.append((due, packet))

    def take(self, now: float) -> list[bytes]:
        """What arrives by now."""
        found = []
        while self._queue and self._queue[0][0] <= now:
            found.append(self._queue.popleft()[1])
        self.passed += len(found)
        return found

    def next_at(self) -> float | None:
        return self._queue[0][0] if self._queue else None


def open_tun(name: str) -> int:
    """A new device; it goes when the file is closed. Raises OSError where that is not allowed."""
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    except OSError:
        os.close(device)
        raise
    return device


def pump(ends: tuple[int, int], control: int) -> None:
    """Carry packets until ``control`` ends."""
    ways = {end: Way(Line(), random.Random(number)) for number, end in enumerate(ends)}
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    said = b""
    while True:
        due = [at for at in (way.next_at() for way in ways.values()) if at is not None]
        wait_s = max(0.0, min(due) - time.monotonic()) if due else None
        readable, _, _ = select.select([*ends, control], [], [], wait_s)
        for end in readable:
            if end == control:
                more = os.read(control, 4096)
                if not more:
                    return
                *lines, said = (said + more).split(b"\n")
                for line in lines:
                    _obey(ways, line)
            else:
                _read(end, ways[end])
        now = time.monotonic()
        for end, way in ways.items():
            for packet in way.take(now):
                _write(other[end], packet)


def _obey(ways: dict[int, Way], words: bytes) -> None:
    line = Line(**json.loads(words))
    for way in ways.values():
        way.line = line
    counted = {name: sum(getattr(way, name) for way in ways.values()) for name in ("passed", "lost", "overflowed")}
    sys.stdout.write(json.dumps(counted) + "\n")
    sys.stdout.flush()


def _read(end: int, way: Way) -> None:
    for _ in range(TURN):
        try:
            packet = os.read(end, PACKET_BYTES)
        except BlockingIOError:
            return
        way.put(time.monotonic(), packet)


def _write(end: int, packet: bytes) -> None:
    try:
        os.write(end, packet)
    except OSError:  # that device is down or its queue is full: a line loses such a packet, too
        return


if __name__ == "__main__":
    pump((int(sys.argv[1]), int(sys.argv[2])), sys.stdin.fileno())
