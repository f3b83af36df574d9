"""Text of user code, models and strangers on a terminal: it moves no cursor, sets no colour and begins no line of ours.

Displays ask this, at their very end; the ledger and ``--json`` keep what was said.
"""

from __future__ import annotations

import unicodedata

GOES_ON = "\n    | "
"""Before each further line of one message."""


def harmless(text: str) -> str:
    """One message: control characters as escapes, further lines marked as its own."""
    return GOES_ON.join(visible(text).rstrip("\n").split("\n"))


def visible(text: str) -> str:
    """Control characters as escapes; lines stay lines."""
    text = text.replace("\r\n", "\n")
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character in "\n\t" or character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode("ascii")
