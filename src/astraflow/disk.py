"""Whether an error means that a disk is full, whoever says it: SQLite, the system, or a library in its own words."""

from __future__ import annotations

import errno
import sqlite3

from astraflow.errors import StorageFull

SPACE_PATIENCE_S = 3600.0
"""How long a worker or trainer waits for space before it gives up: long enough for people to come and make some."""
_WORDS = ("No space left on device", "os error 28", "Disk quota exceeded", "os error 122")
"""Of libraries that write by themselves (safetensors)."""


def is_full(error: BaseException) -> bool:
    """True if more space would have helped; what it was caused by is looked at too."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, StorageFull):
            return True
        if isinstance(at, sqlite3.OperationalError):
            if getattr(at, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL or "is full" in str(at):
                return True
        elif isinstance(at, OSError):
            if at.errno in (errno.ENOSPC, errno.EDQUOT):
                return True
        elif any(words in str(at) for words in _WORDS):
            return True
        at = at.__cause__
    return False
