"""How busy workers and trainers are, from the counters in their reports: differences over a moving window, in memory.

A restarted process counts from zero again: it is another one. A change in who serves begins the window anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from astraflow.dataflow.components import ROLLOUT, TRAINER, ComponentRow
from astraflow.observe.waits import Wait

SAMPLE_S = 2.0
RATE_S = 60.0
"""Window of what is shown of one worker."""
ACTIVE, TOKENS = "playing/active_s", "token/sampled"
WAITS = f"wait_s/{Wait.BATCH.value}"

Key = tuple[str, str]
"""Name and incarnation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """All counters at one moment."""

    at: float
    event: int
    """Id of the newest event."""
    active_s: dict[Key, float] = field(default_factory=dict)
    tokens: dict[Key, float] = field(default_factory=dict)
    waited_s: dict[Key, float] = field(default_factory=dict)


class Meter:
    """``read`` every tick; questions any time."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._readings: deque[Reading] = deque()
        self._serving: frozenset[Key] = frozenset()
        self._began = float("-inf")
        """Since when the same workers serve."""

    def due(self, now: float) -> bool:
        return not self._readings or now - self._readings[-1].at >= SAMPLE_S

    def read(self, now: float, rows: Sequence[ComponentRow], serving: frozenset[Key], event: int) -> None:
        """``rows``: who is alive."""
        if serving != self._serving:
            self._serving, self._began = serving, now
        workers = {(row.name, row.incarnation): row for row in rows if row.component == ROLLOUT}
        trainers = {(row.name, row.incarnation): row for row in rows if row.component == TRAINER}
        self._readings.append(
            Reading(
                at=now,
                event=event,
                active_s={key: row.report.metrics.get(ACTIVE, 0.0) for key, row in workers.items()},
                tokens={key: row.report.metrics.get(TOKENS, 0.0) for key, row in workers.items()},
                waited_s={key: _waited(now, row) for key, row in trainers.items()},
            )
        )
        oldest = now - max(self._window_s, RATE_S)
        while len(self._readings) > 2 and self._readings[1].at <= oldest:
            self._readings.popleft()

    def is_of(self, serving: frozenset[Key]) -> bool:
        """Whether those were measured; who came or went since the last reading was not."""
        return serving == self._serving

    def window(self, seconds: float | None = None) -> tuple[Reading, Reading] | None:
        """First and last reading of the window; of ``seconds``, or since the serving workers changed. None: too few."""
        if not self._readings:
            return None
        last = self._readings[-1]
        begin = max(self._began, last.at - self._window_s) if seconds is None else last.at - seconds
        first = next((reading for reading in self._readings if reading.at >= begin), last)
        return (first, last) if last.at > first.at else None

    def wait(self) -> float | None:
        """The largest share of its time that a trainer waited for a batch; None: none was there all the time."""
        found = self.window()
        if found is None:
            return None
        first, last = found
        span = last.at - first.at
        shares = [
            (last.waited_s[key] - first.waited_s[key]) / span for key in last.waited_s.keys() & first.waited_s.keys()
        ]
        return max(0.0, min(1.0, max(shares))) if shares else None

    def active(self) -> float | None:
        """Share of their time in which the serving workers had an episode to play, on average."""
        found = self.window()
        if found is None:
            return None
        first, last = found
        keys = self._serving & last.active_s.keys() & first.active_s.keys()
        if not keys:
            return None
        total = sum(last.active_s[key] - first.active_s[key] for key in keys)
        return max(0.0, min(1.0, total / (last.at - first.at) / len(keys)))

    def tokens_per_s(self, key: Key) -> float | None:
        """Over the last minute, or as long as the worker is there; None: not known yet."""
        found = self.window(RATE_S)
        if found is None:
            return None
        first = next((each for each in self._readings if each.at >= found[0].at and key in each.tokens), None)
        last = found[1]
        if first is None or key not in last.tokens or last.at <= first.at:
            return None
        return max(0.0, last.tokens[key] - first.tokens[key]) / (last.at - first.at)


def _waited(now: float, row: ComponentRow) -> float:
    """With the wait that is going on, which its counter does not hold before it ends."""
    going_on = 0.0
    if row.report.doing == Wait.BATCH.value:
        going_on = row.report.since_s + max(0.0, now - row.heard_at)
    return row.report.metrics.get(WAITS, 0.0) + going_on
