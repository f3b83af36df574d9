"""Which groups now? Group ids grow in the order of admission, arrivals in the order of closing: ties never look at
anything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor

from astraflow.algorithms.base import ReadyGroup, Replay, Select
from astraflow.algorithms.checks import check_at_least, check_part
from astraflow.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class EarliestDeadline:
    """Oldest version first, since it goes stale first; ties by arrival.

    Without a window a batch is whatever is ready: short episodes overtake long ones. With it, at most ``window - 1``
    younger groups may overtake the oldest open one, so the batch is never biased to short answers by more than that;
    the wait ends since every episode has a time limit. A group without a version (supervised) takes its turn among
    those that arrived around it.
    """

    window: int | None = None
    """Groups; at least those of one batch."""

    def __post_init__(self) -> None:
        _check_window(self.window)

    def pick(self, ready: Sequence[ReadyGroup], *, need: int, oldest_open: int | None) -> list[int]:
        within = _within(ready, self.window, oldest_open)
        if len(within) < need:
            return []
        return [group.group for _, _, group in _by_deadline(within)[:need]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fifo:
    """In the order of arrival, for comparison; windowed as above."""

    window: int | None = None

    def __post_init__(self) -> None:
        _check_window(self.window)

    def pick(self, ready: Sequence[ReadyGroup], *, need: int, oldest_open: int | None) -> list[int]:
        within = sorted(_within(ready, self.window, oldest_open), key=lambda group: group.arrival)
        return [group.group for group in within[:need]] if len(within) >= need else []


def replay_count(batch: int, fraction: float | str | Fraction, owed: Fraction = Fraction(0)) -> int:
    """Groups of a batch that are replayed: ``owed + batch × fraction``, half up, in exact decimals (F63: 100 × 0.29 is
    29). ``owed``: what rounding has left of the batches before."""
    return floor(owed + batch * exact_share(fraction) + Fraction(1, 2))


def exact_share(fraction: float | str | Fraction) -> Fraction:
    """As it is written: 0.29 is 29/100, not the float beside it. Raises ConfigError unless it is in [0, 1)."""
    try:
        exact = fraction if isinstance(fraction, Fraction) else Fraction(str(fraction))
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"replay fraction must be a number in [0, 1), found {fraction!r}") from None
    if not 0 <= exact < 1:
        raise ConfigError(f"replay fraction must be in [0, 1), found {fraction}")
    return exact


def check_select(who: str, select: Select) -> None:
    """One that does not replay: only the outermost Select is asked for what is to be replayed, and one inside another
    would never replay."""
    check_part(f"{who}.select", select, Select)
    if isinstance(select, Replay):
        raise ConfigError(
            f"{who}.select must not replay by itself, {type(select).__name__} inside it would never be asked to; "
            f"put {type(select).__name__} around the others"
        )


def _by_deadline(ready: Sequence[ReadyGroup]) -> list[tuple[int, int, ReadyGroup]]:
    """(deadline, arrival, group), sorted; a group without a version has that of the newest one that came before it."""
    newest = -1
    keyed: list[tuple[int, int, ReadyGroup]] = []
    for group in sorted(ready, key=lambda each: each.arrival):
        version = newest if group.min_version is None else group.min_version
        newest = max(newest, version)
        keyed.append((version, group.arrival, group))
    return sorted(keyed, key=lambda item: item[:2])


def _within(ready: Sequence[ReadyGroup], window: int | None, oldest_open: int | None) -> list[ReadyGroup]:
    if window is None or oldest_open is None:
        return list(ready)
    return [group for group in ready if group.group < oldest_open + window]


def _check_window(window: int | None) -> None:
    check_at_least("window", window, 1, of=" group", orelse=" or None (no window)")
