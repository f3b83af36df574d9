"""Folders that a process needs while it lives, beside what it keeps. Once it is gone, whoever comes next removes them.

.alive-TOKEN     locked by a process for as long as it lives, however it ends
.export-TOKEN-…  its weights on their way to the store
.partial-TOKEN-… its checkpoint that is being written
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import IO

ALIVE, EXPORT, PARTIAL = ".alive-", ".export-", ".partial-"


class Scratch:
    """Of one process in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._token = secrets.token_hex(6)
        self._marked = False

    def make(self, kind: str) -> Path:
        """A new empty folder. ``kind``: EXPORT or PARTIAL."""
        self._folder.mkdir(parents=True, exist_ok=True)
        while not self._marked:
            self._marked = self._mark()
        return Path(tempfile.mkdtemp(prefix=f"{kind}{self._token}-", dir=self._folder))

    def clear(self) -> None:
        """Remove what processes have left that live no more; those of others that live stay."""
        living = set()
        for path in self._folder.glob(f"{ALIVE}*"):
            with path.open("ab") as file:
                if lock(file):
                    path.unlink(missing_ok=True)
                else:
                    living.add(path.name.removeprefix(ALIVE))
        for kind in (EXPORT, PARTIAL):
            for path in self._folder.glob(f"{kind}*"):
                if path.name.removeprefix(kind).partition("-")[0] not in living:
                    shutil.rmtree(path, ignore_errors=True)

    def _mark(self) -> bool:
        """False: somebody took it for one that was left, before it was locked."""
        path = self._folder / f"{ALIVE}{self._token}"
        file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        if lock(file) and path.exists() and os.path.samestat(path.stat(), os.fstat(file)):
            weakref.finalize(self, _unmark, file, path)  # at the end of the process too, unless it is killed
            return True
        os.close(file)
        return False


def _unmark(file: int, path: Path) -> None:
    path.unlink(missing_ok=True)
    os.close(file)


def lock(file: IO[bytes] | int) -> bool:
    """Held until the file is closed, or its process is gone. False: another one holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
