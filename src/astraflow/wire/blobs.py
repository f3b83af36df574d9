"""What a server asks of a weight store. Calls block: the server makes them in a thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

Pull = Callable[[str, int], int | None]
"""(sha256, size) → begin or go on to get the file; how many bytes of it are here. None: it cannot be had."""


class Incoming(Protocol):
    """A file on its way in: invisible until ``commit``."""

    def write(self, chunk: bytes) -> None:
        """Append. Raises StorageFull."""

    def commit(self) -> None:
        """Verify, make durable and visible. Raises DigestMismatch; the file is then gone."""

    def abort(self) -> None:
        """Forget it. May follow anything, any number of times."""


class Readable(Protocol):
    """Immutable files by SHA-256."""

    def path(self, sha256: str) -> Path | None:
        """Where the file lies, if it is here."""


class Blobs(Protocol):
    """Files that can be added to; ``weights.store.DirStore`` is one."""

    def path(self, sha256: str) -> Path | None:
        """Where the file lies, if it is here."""

    def refresh(self, sha256: str) -> bool:
        """Whether the file is here; it then counts as put now: who names it in a manifest soon will find it there."""

    def incoming(self, sha256: str) -> Incoming:
        """Begin to receive a file; must be quick. Raises StorageFull."""
