"""Disks that are full or may not be written: whoever says it (SQLite, the system, a library in its own words), it
becomes one sentence with the path and what to do."""

from __future__ import annotations

import errno
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from astraflow.errors import AstraFlowError, ConfigError, StorageFull

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


WORDS = " cannot be written: "
"""Of an error that says its path already."""


@contextmanager
def writing(path: Path, instead: str = "") -> Iterator[None]:
    """What is written below goes to ``path``. Raises StorageFull where its disk is full, ConfigError where it may not
    be written; ``instead``: what else can be done, for example ``name another folder``."""
    try:
        yield
    except Exception as error:
        is_told = isinstance(error, AstraFlowError) and not isinstance(error, StorageFull)
        words = None if is_told or WORDS in str(error) else refusal(path, error, instead)
        if words is None:
            raise
        raise (StorageFull if is_full(error) else ConfigError)(words) from error


def refusal(path: Path | str, error: BaseException, instead: str = "") -> str | None:
    """In one sentence; None: it is no error of a disk."""
    if is_full(error):
        return f"{path}{WORDS}its disk is full; make room there{instead and f', or {instead}'}"
    if not isinstance(error, OSError) or isinstance(error, ConnectionError | TimeoutError) or error.strerror is None:
        return None
    where = f" ({error.filename})" if error.filename is not None and str(error.filename) != str(path) else ""
    return f"{path}{WORDS}{error.strerror}{where}; {instead or 'let this user write there'}"


@contextmanager
def absent_if_raises(partial: Path) -> Iterator[None]:
    """Nothing is left of a file or folder that could not be written whole."""
    try:
        yield
    except BaseException:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        raise
