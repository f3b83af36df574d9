"""What user code says, in words that can be sent: its ``__str__`` may raise, and its text may be no Unicode."""

from __future__ import annotations

from typing import Any

LONGEST = 80


def words_of(error: BaseException) -> str:
    """``Kind: message``, or the kind alone."""
    kind = type(error).__name__
    try:
        message = str(error)
    except Exception as broken:  # noqa: BLE001 - a message that cannot be made: the kind still says something
        return f"{kind} (its message raised {type(broken).__name__})"
    return f"{kind}: {message}" if message else kind


def shown(value: Any) -> str:
    """The beginning of its ``repr``."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - an integer of 5,000 digits has none, nor has what user code broke
        return f"something of type {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def is_text(value: Any) -> bool:
    """A str that UTF-8 can hold: halves of surrogate pairs, as file names may have, it cannot."""
    return isinstance(value, str) and sendable(value) == value


def sendable(text: str) -> str:
    """The text, with an escape for what UTF-8 cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
