"""What the service does and waits for, in names and seconds: the source of its line in ``astraflow status``."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from astraflow.clock import Clock
from astraflow.observe.waits import QUARANTINED, Wait
from astraflow.wire.messages import ComponentReport

_FIRST = (Wait.STORAGE, Wait.DATAFLOW, Wait.WEIGHTS)
"""Waits that stop everything: shown even while episodes are played."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Going:
    wait: Wait
    why: str
    since: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """With the weights of a policy."""

    why: str
    out: bool
    """The worker may not serve."""


class Activity:
    """Counters and the waits that are going on now."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ids = itertools.count()
        self._going: dict[int, _Going] = {}
        self._waited: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._playing = 0
        self._playing_since = clock.monotonic()
        self._active_s = 0.0
        """Time with at least one episode, up to ``_playing_since``."""
        self.why = ""
        """Why dataflow had no lease the last time."""
        self.pulling: Callable[[], dict[str, int]] = dict
        """Serial per policy whose weights are being fetched now."""
        self.weights: Callable[[], dict[str, float]] = dict
        """Counters of how weights came."""
        self.trouble: Callable[[], Trouble | None] = lambda: None
        """The worst with weights now."""
        self._out_since: float | None = None

    @contextmanager
    def waiting(self, wait: Wait, why: str = "") -> Iterator[None]:
        key = next(self._ids)
        going = self._going[key] = _Going(wait=wait, why=why, since=self._clock.monotonic())
        try:
            yield
        finally:
            del self._going[key]
            self._waited[wait.value] += self._clock.monotonic() - going.since  # type: ignore[assignment]  # seconds

    def count(self, name: str, amount: int = 1) -> None:
        self._counts[name] += amount

    def playing(self, episodes: int) -> None:
        """So many leases are held now."""
        if bool(episodes) != bool(self._playing):
            now = self._clock.monotonic()
            self._active_s += now - self._playing_since if self._playing else 0.0
            self._playing_since = now
        self._playing = episodes

    @property
    def counts(self) -> dict[str, int]:
        return dict(self._counts)

    def report(self, versions: dict[str, int], *, error: str | None = None) -> ComponentReport:
        now = self._clock.monotonic()
        metrics = {**self.weights(), **{name: float(count) for name, count in self._counts.items()}}
        metrics["playing/active_s"] = self._active_s + (now - self._playing_since if self._playing else 0.0)
        for wait in Wait:
            going_on = sum(now - going.since for going in self._going.values() if going.wait is wait)
            seconds = self._waited[wait.value] + going_on
            if seconds:
                metrics[f"wait_s/{wait.value}"] = float(seconds)
        doing, since, why = self._line()
        return ComponentReport(
            doing=doing,
            since_s=max(0.0, now - since),
            why=why,
            versions=versions,
            pulling=self.pulling(),
            metrics=metrics,
            error=error,
        )

    def _line(self) -> tuple[str, float, str]:
        trouble = self.trouble()
        if trouble is not None and trouble.out:
            self._out_since = self._clock.monotonic() if self._out_since is None else self._out_since
            return QUARANTINED, self._out_since, trouble.why
        self._out_since = None
        going = list(self._going.values())
        for wait in _FIRST:
            found = min((each for each in going if each.wait is wait), key=lambda each: each.since, default=None)
            if found is not None:
                return wait.value, found.since, found.why
        if self._playing:
            return f"playing {self._playing} episodes", self._playing_since, trouble.why if trouble else ""
        found = min(going, key=lambda each: each.since, default=None)
        if found is not None:
            return found.wait.value, found.since, found.why or self.why
        return "starting", self._playing_since, ""
