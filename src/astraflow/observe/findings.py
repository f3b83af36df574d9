"""What the doctor is told of one policy, and what it says of each thing that it looks at. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean

RECENT_STEPS = 20
"""Steps that count as now: enough to average noise, few enough that what was mended no longer shows."""


class State(StrEnum):
    NORMAL = "normal"
    UNKNOWN = "unknown"
    WATCH = "watch"
    BROKEN = "broken"


@dataclass(frozen=True, kw_only=True, slots=True)
class Symptoms:
    """What a run's ledger says of one policy. Counts of groups and tokens are of the recent part of the run."""

    policy: str
    max_staleness: int
    failed: str = ""
    """Why the run has failed."""
    absent: str = ""
    """Which process the policy cannot do without, of a run that is going on, is not there."""
    steps: int = 0
    """Committed."""
    groups: int = 0
    """Judged: kept, whatever became of their batch, or dropped for want of signal."""
    flat: Mapping[str, int] = field(default_factory=dict)
    """Of them, those without variance, by where everyone was: ``lowest``, ``highest`` or ``between`` of the rewards
    that the run has seen, ``only`` where it has seen a single one, ``alone`` where nobody had anyone to be compared
    with."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Beside ``groups``: dropped by Keep, by reasons that say something of the group and nothing of its signal."""
    stale_groups: int = 0
    """Beside ``groups``: went stale, were never trained."""
    trained_tokens: int = 0
    masked_tokens: Mapping[str, int] = field(default_factory=dict)
    """In the groups of batches that ended, by reason."""
    batches: int = 0
    """Ended: committed or dropped."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Of them without a step, by reason."""
    episodes: int = 0
    given_up: Mapping[str, int] = field(default_factory=dict)
    """Of them, by failure kind."""
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Metric → its values by step, oldest first, of the whole run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: State
    found: str
    normal: str
    """What it is like in a run that learns."""
    advice: str = ""
    """What to do; empty where nothing is to be done."""


def recent(it: Symptoms, name: str) -> float | None:
    values = it.series.get(name, ())[-RECENT_STEPS:]
    return fmean(values) if values else None


def above(value: float, watch: float, broken: float) -> State:
    return State.BROKEN if value >= broken else State.WATCH if value >= watch else State.NORMAL


def below(value: float, watch: float, broken: float) -> State:
    return State.BROKEN if value <= broken else State.WATCH if value <= watch else State.NORMAL
