"""Bytes of episodes and frozen batches: in the row up to 1 MiB, else content-addressed files beside the database.

A file is on disk under its final name before the row that names it is committed; one that no row names is garbage.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from pathlib import Path
from typing import TypeVar

import msgspec

from astraflow.dataflow.store import Store
from astraflow.errors import DigestMismatch, NotFound
from astraflow.types import Episode
from astraflow.wire.codec import decode, encode

R = TypeVar("R", bound=msgspec.Struct)

IN_ROW_BYTES = 1 << 20
STORED_LIMIT_BYTES = 1 << 32
"""Far above what the wire lets in: what was stored must always be readable again."""


RECENT_BYTES = 64 << 20


class Recent:
    """Decoded episodes of the groups that were stored last, so that to settle and to cut decodes nothing.

    A memory of the tables and never more: whoever rolls anything back empties it, a missing member is read again. Only
    records that nobody can change are kept: those that came over the wire.
    """

    def __init__(self, limit_bytes: int = RECENT_BYTES) -> None:
        self._limit = limit_bytes
        self._groups: OrderedDict[int, dict[int, tuple[int, Episode]]] = OrderedDict()
        self._bytes = 0

    def put(self, group: int, idx: int, size: int, episode: Episode) -> None:
        members = self._groups.setdefault(group, {})
        self._bytes -= members.pop(idx, (0, episode))[0]
        if _is_frozen(episode):
            members[idx] = (size, episode)
            self._bytes += size
        while self._bytes > self._limit:
            self.drop(next(iter(self._groups)))

    def get(self, group: int, idx: int) -> Episode | None:
        found = self._groups.get(group, {}).get(idx)
        return found[1] if found else None

    def drop(self, group: int) -> None:
        self._bytes -= sum(size for size, _ in self._groups.pop(group, {}).values())

    def clear(self) -> None:
        self._groups.clear()
        self._bytes = 0


def _is_frozen(episode: Episode) -> bool:
    samples = [sample for trajectory in episode.trajectories for sample in trajectory.samples]
    arrays = [array for each in samples for array in (each.tokens, each.sampled, each.logprobs)]
    return not any(array.flags.writeable for array in (*arrays, *episode.features.values()))


class Payloads:
    """Without a folder (a database in memory) everything is in the row."""

    def __init__(self, store: Store, folder: Path | None) -> None:
        self._store = store
        self._folder = folder
        self._recent = Recent()
        store.on_rollback.append(self._recent.clear)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def pack(self, record: msgspec.Struct) -> tuple[int, str | None, bytes | None]:
        """(bytes, file, body): exactly one of file and body is set. Raises OSError, the disk being full among them."""
        body = encode(record)
        if self._folder is None or len(body) <= IN_ROW_BYTES:
            return len(body), None, body
        name = hashlib.sha256(body).hexdigest()
        path = self._folder / name
        if not path.exists():
            self._write(path, body)
        return len(body), name, None

    def unpack(self, kind: type[R], file: str | None, body: bytes | None) -> R:
        """Raises NotFound (pruned) and DigestMismatch."""
        if body is None:
            body = self._read(file)
        return decode(body, kind, limit_bytes=STORED_LIMIT_BYTES)

    def _read(self, file: str | None) -> bytes:
        if file is None or self._folder is None:
            raise NotFound("these bytes were pruned: the run keeps only what a replay or a resume may still need")
        path = self._folder / file
        if not path.exists():
            raise NotFound(f"payload {path} is missing")
        body = path.read_bytes()
        if hashlib.sha256(body).hexdigest() != file:
            raise DigestMismatch(f"payload {path} does not have the digest in its name: the file is damaged")
        return body

    def names(self) -> list[str]:
        """Every file of the folder."""
        return [] if self._folder is None else sorted(entry.name for entry in os.scandir(self._folder))

    def remove(self, name: str) -> None:
        """Unless a row names it. Raises OSError."""
        named = self._store.one(
            "SELECT 1 FROM payloads WHERE file = ? UNION ALL SELECT 1 FROM batches WHERE file = ? LIMIT 1", name, name
        )
        if named is None and self._folder is not None:
            (self._folder / name).unlink(missing_ok=True)

    def _write(self, path: Path, body: bytes) -> None:
        part = path.with_suffix(".part")
        try:
            with part.open("wb") as handle:
                handle.write(body)
                handle.flush()
                os.fsync(handle.fileno())
            part.rename(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    # ── episodes ──

    def put_episode(self, group: int, idx: int, episode: Episode) -> None:
        size, file, body = self.pack(episode)
        self._store.run(
            "INSERT OR REPLACE INTO payloads (group_id, idx, bytes, file, body) VALUES (?, ?, ?, ?, ?)",
            (group, idx, size, file, body),
        )
        self._recent.put(group, idx, size, episode)

    def episodes(self, group: int, size: int) -> list[Episode | None]:
        """All members by index; None where nothing was stored."""
        members: list[Episode | None] = [None] * size
        for (idx,) in self._store.all("SELECT idx FROM payloads WHERE group_id = ?", group):
            members[idx] = self._recent.get(group, idx) or self._episode(group, idx)
        return members

    def _episode(self, group: int, idx: int) -> Episode:
        row = self._store.one("SELECT file, body FROM payloads WHERE group_id = ? AND idx = ?", group, idx)
        assert row is not None
        return self.unpack(Episode, *row)

    def forget(self, group: int) -> None:
        """Its episodes are not expected to be asked for again soon."""
        self._recent.drop(group)
