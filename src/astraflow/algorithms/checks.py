"""What the options of algorithms may be. A check raises ConfigError: the option, what it must be, what was found."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from astraflow.errors import ConfigError

MOST_EPISODES = 65_536
"""Of one group: each of them is a row of the ledger, made when the group is opened."""


def check_at_least(name: str, value: Any, lowest: int, *, of: str = "", orelse: str = "") -> None:
    """A whole number. ``of``: what is counted; ``orelse``: what None means, where it may be None."""
    if value is None and orelse:
        return
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{name} must be a whole number{orelse}, found {value!r}")
    if value < lowest:
        raise ConfigError(f"{name} must be at least {lowest}{of}{orelse}, found {value}")


def check_episodes(name: str, value: Any) -> None:
    """The size of a group."""
    check_at_least(name, value, 1)
    if value > MOST_EPISODES:
        raise ConfigError(f"{name} must be at most {MOST_EPISODES} episodes, found {value}")


def check_share(name: str, value: Any) -> None:
    if not (is_number(value) and 0 <= value <= 1):
        raise ConfigError(f"{name} must be in [0, 1], found {value!r}")


def check_above_zero(name: str, value: Any) -> None:
    if not (is_number(value) and 0 < value < float("inf")):
        raise ConfigError(f"{name} must be in (0, inf), found {value!r}")


def check_finite(name: str, value: Any) -> None:
    if not (is_number(value) and abs(value) < float("inf")):
        raise ConfigError(f"{name} must be finite, found {value!r}")


def check_part(name: str, part: Any, protocol: Any) -> None:
    """Another object that an algorithm works with: one of the protocol or class, and not a class itself."""
    if isinstance(part, type) or not isinstance(part, protocol):
        found = part.__name__ + " (the class, not an object)" if isinstance(part, type) else type(part).__name__
        raise ConfigError(f"{name} must be a {protocol.__name__}, found {found}")


def is_number(value: Any) -> bool:
    """What a float can hold, NaN and infinity included."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:  # a whole number beyond all floats
        return False
    return True
