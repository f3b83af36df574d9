"""How many rollout workers a run should have: one pure function, AstraFlow's control law.

With G workers, the trainer's share of time that it waits for data w, and the rates at which episodes are consumed and
could be produced (AstraFlow, arXiv 2605.15565, on elastic rollout; thresholds are its defaults, here settings):

    w > 0.10                          →  ⌈G / (1 − w)⌉                          the trainer starves: grow
    w < 0.05, produced > consumed > 0 →  min(G, ⌈1.1 · G · consumed / produced⌉)  workers idle: shrink
    else                              →  G

Between the two thresholds nothing is done, nor where the change is below ``dead_band`` of G. A change of G begins a new
measurement: nothing is decided before ``cool_down_s`` of it. Limits hold at once, whatever is measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from astraflow.errors import ConfigError

GROW, SHRINK, HOLD = "grow", "shrink", "hold"
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """Of ``Recipe.scaling``: what ``GET /v1/pool/target`` and ``astraflow autoscale`` go by."""

    least: int = 1
    """Workers that there are at any time while the run goes on."""
    most: int = 64
    wait_high: float = 0.10
    """Share of the trainer's time spent waiting for data above which workers are added."""
    wait_low: float = 0.05
    """Share below which workers may be taken away."""
    spare: float = 1.1
    """What is left after that: this many times what the trainer consumes."""
    dead_band: float = 0.05
    """A change by less than this share of the workers is not made."""
    growth: float = 2.0
    """One decision multiplies the workers by at most so much."""
    cool_down_s: float = 60.0
    """Of measuring, before a decision and after each change of the number of workers."""
    window_s: float = 180.0
    """Older measurements do not count."""

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most <= 100_000:
            raise ConfigError(f"Scaling needs 0 <= least <= most <= 100000, found {self.least}, {self.most}")
        if not 0 <= self.wait_low <= self.wait_high < 1:
            raise ConfigError(f"Scaling needs 0 <= wait_low <= wait_high < 1, found {self.wait_low}, {self.wait_high}")
        if not 1 <= self.spare < float("inf"):
            raise ConfigError(f"Scaling.spare must be in [1, inf), found {self.spare}")
        if not 0 <= self.dead_band < 1:
            raise ConfigError(f"Scaling.dead_band must be in [0, 1), found {self.dead_band}")
        if not 1 < self.growth < float("inf"):
            raise ConfigError(f"Scaling.growth must be in (1, inf), found {self.growth}")
        if not 0 < self.cool_down_s <= self.window_s < float("inf"):
            raise ConfigError(
                f"Scaling needs 0 < cool_down_s <= window_s < inf, found {self.cool_down_s}, {self.window_s}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Since the number of workers changed last, at most ``window_s`` ago."""

    workers: int
    """G: those that serve."""
    span_s: float = 0.0
    """How long that has been measured."""
    wait: float | None = None
    """w in [0, 1]; None: no trainer could be measured."""
    trains: bool = True
    """A trainer is alive."""
    consumed: float = 0.0
    """Episodes/s that went into committed batches."""
    produced: float = 0.0
    """Episodes/s that the workers could bring: what they brought, over the share of their time in which they had any.
    Under back-pressure they can't bring more than is consumed; what they could is the time in which they have none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    action: str
    """``grow``, ``shrink`` or ``hold``."""
    workers: int
    reason: str


def decide(scaling: Scaling, measured: Measured) -> Decision:
    """The number of workers that the run should have now."""
    count = measured.workers
    if count < scaling.least:
        return Decision(action=GROW, workers=scaling.least, reason=f"at least {scaling.least} are asked for")
    if count > scaling.most:
        return Decision(action=SHRINK, workers=scaling.most, reason=f"at most {scaling.most} are allowed")
    if count == 0:
        return _hold(0, "none is asked for")
    if measured.wait is None:
        return _hold(count, _unmeasured(scaling, measured))
    if measured.span_s < scaling.cool_down_s:
        return _hold(count, f"measured for {measured.span_s:.0f} s of {scaling.cool_down_s:g} s")
    wanted, reason = _wanted(scaling, measured, measured.wait)
    wanted = max(scaling.least, min(scaling.most, wanted))
    if wanted == count:
        return _hold(count, reason)
    if abs(wanted - count) < scaling.dead_band * count - _ROUNDING:
        return _hold(count, f"{reason}; {wanted} would change less than {scaling.dead_band:.0%}")
    return Decision(action=GROW if wanted > count else SHRINK, workers=wanted, reason=reason)


def _unmeasured(scaling: Scaling, measured: Measured) -> str:
    if not measured.trains:
        return "no trainer is there to be measured"
    if measured.span_s < scaling.cool_down_s:
        return f"not measured yet: the same workers must have served for {scaling.cool_down_s:g} s"
    return f"not measured yet: the trainer was not there for all of the last {measured.span_s:.0f} s"


def _wanted(scaling: Scaling, measured: Measured, wait: float) -> tuple[int, str]:
    count = measured.workers
    if wait > scaling.wait_high:
        most = math.floor(count * scaling.growth)
        free = max(1.0 - wait, 1.0 / (scaling.growth * 2))  # w = 1 asks for infinitely many
        return min(max(count + 1, most), _ceil(count / free)), f"the trainer waits {wait:.0%} of its time"
    if wait < scaling.wait_low and measured.produced > measured.consumed > 0:
        kept = _ceil(scaling.spare * count * measured.consumed / measured.produced)
        rates = f"{measured.consumed:.3g} of {measured.produced:.3g} episodes/s are consumed"
        return min(count, kept), f"the trainer waits {wait:.0%} of its time, {rates}"
    return count, f"the trainer waits {wait:.0%} of its time"


def _hold(count: int, reason: str) -> Decision:
    return Decision(action=HOLD, workers=count, reason=reason)


def _ceil(value: float) -> int:
    """Of a quotient: what is an integer but for rounding is that integer."""
    return math.ceil(value - _ROUNDING * max(1.0, value))
