"""The weight files that a relay has at hand for others, by SHA-256; bounded, and mostly for free.

A file is linked from where its worker keeps it: as long as that copy lives it takes no space. Of those that only the
shelf still holds, the newest are kept while they fit into ``limit_bytes``.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

from astraflow.errors import ConfigError, DigestMismatch
from astraflow.types import WeightFile
from astraflow.weights.store import PART, SUFFIX
from astraflow.wire.names import require_sha256
from astraflow.wire.transfer import verify


class Shelf:
    """Of one process, in a folder of its own; ``wire.blobs.Readable``. Calls block, and may come from any thread."""

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        if limit_bytes < 0:
            raise ConfigError(f"a relay's disk must be at least 0 bytes, found {limit_bytes}")
        self.folder = folder
        self._limit_bytes = limit_bytes
        self._files: OrderedDict[str, Path] = OrderedDict()
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, sha256: str) -> Path | None:
        """Where the file lies, if it is here."""
        path = self._place(sha256)
        return path if path.is_file() else None

    def add(self, file: WeightFile, source: Path) -> None:
        """Show a verified file that nobody will write to again. Raises OSError when the disk is full."""
        place = self._place(file.sha256)
        part = self.folder / f"{PART}{secrets.token_hex(8)}"
        try:
            try:
                os.link(source, part)
            except OSError:  # another disk, or a file system without links
                shutil.copyfile(source, part)
            part.replace(place)
        finally:
            part.unlink(missing_ok=True)
        with self._lock:
            self._files[file.sha256] = place
            self._files.move_to_end(file.sha256)
            self._trim(spare=file.sha256)

    def lend(self, file: WeightFile, into: Path) -> bool:
        """Make ``into`` a verified link or copy of it; False if it is not here, or has rotted. ``into`` may exist."""
        part = into.with_name(f"{PART}lent-{into.name}")  # two may take the same file into one folder at a time
        part.unlink(missing_ok=True)
        try:
            try:
                os.link(self._place(file.sha256), part)
            except FileNotFoundError:
                return False
            except OSError:  # as above
                shutil.copyfile(self._place(file.sha256), part)
            verify(part, file)
            part.replace(into)
        except FileNotFoundError:
            return False
        except DigestMismatch:
            self.drop(file.sha256)  # else it would be lent again, and again be found wrong
            return False
        finally:
            part.unlink(missing_ok=True)
        return True

    def drop(self, sha256: str) -> None:
        """Forget a file: it is not what it was."""
        with self._lock:
            self._remove(sha256)

    def _remove(self, sha256: str) -> None:
        self._files.pop(sha256, None)
        self._place(sha256).unlink(missing_ok=True)

    def _trim(self, *, spare: str) -> None:
        taken = 0
        for sha256, place in reversed(list(self._files.items())):
            with suppress(FileNotFoundError):
                found = place.stat()
                own = found.st_size if found.st_nlink == 1 else 0
                if sha256 == spare or taken + own <= self._limit_bytes:
                    taken += own
                    continue
            self._remove(sha256)

    def _place(self, sha256: str) -> Path:
        return self.folder / f"{require_sha256(sha256, 'sha256')}{SUFFIX}"
