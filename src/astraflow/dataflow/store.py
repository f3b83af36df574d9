"""The ledger's database: one SQLite connection, transactions with savepoints, events and counters. Knows no rule."""

from __future__ import annotations

import fcntl
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import IO, Any

import msgspec

from astraflow.disk import is_full
from astraflow.errors import Conflict, StorageFull

Row = tuple[Any, ...]
ADD_EVENT = "INSERT INTO events (at, kind, group_id, idx, policy, batch, data) VALUES (?, ?, ?, ?, ?, ?, ?)"
ADD_COUNT = "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value"


def connect(target: Path | str) -> sqlite3.Connection:
    """A connection to a file, to ``:memory:`` or to a ``file:…?mode=memory&cache=shared`` URI."""
    text = str(target)
    connection = sqlite3.connect(
        text, uri=text.startswith("file:"), isolation_level=None, check_same_thread=False, cached_statements=512
    )
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA busy_timeout = 5000")
    connection.execute("PRAGMA secure_delete = OFF")  # on in Debian: pruned pages would be written once more, as zeros
    connection.execute("PRAGMA wal_autocheckpoint = 4000")
    return connection


LOCK, LISTED = "dataflow.lock", Path("/proc/locks")


def lock_run(folder: Path) -> IO[bytes]:
    """Hold the run: until the file is closed, or this process dies, no second dataflow may open it. Conflict."""
    handle = (folder / LOCK).open("ab")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        handle.close()
        raise Conflict(f"another dataflow serves {folder}: stop it first, or wait until it is dead") from error
    return handle


def is_held(folder: Path) -> bool:
    """Whether a dataflow lives that holds the run, whatever it answers.

    Read from what the system lists: to try the lock would hold it for a moment, and refuse a dataflow that starts then.
    False as well where the system lists none (no ``/proc/locks``).
    """
    try:
        inode = str((folder / LOCK).stat().st_ino)
        listed = LISTED.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return False
    # number: FLOCK ADVISORY WRITE pid device:inode start end; one that waits has an arrow after its number
    locks = [words for line in listed if len(words := line.split()) == 8 and words[1] == "FLOCK"]
    return any(words[5].rpartition(":")[2] == inode for words in locks)


class Store:
    """Statements, and the two logs that every transition writes: within a transaction they are collected and written
    right before its end, in order, so that a hundred events cost one statement."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.run = connection.execute
        self.run_many = connection.executemany
        self._events: list[Row] = []
        self._counts: list[tuple[str, float]] = []
        self.on_rollback: list[Callable[[], None]] = []
        """Called whenever anything is rolled back: memories of the tables are then worth nothing."""
        schema = resources.files("astraflow.dataflow").joinpath("schema.sql").read_text()
        connection.executescript(schema)

    def one(self, sql: str, *values: Any) -> Row | None:
        row: Row | None = self.run(sql, values).fetchone()
        return row

    def all(self, sql: str, *values: Any) -> list[Row]:
        return self.run(sql, values).fetchall()

    def number(self, sql: str, *values: Any) -> int:
        """The single integer that the query answers; 0 for NULL."""
        row = self.one(sql, *values)
        return int(row[0] or 0) if row else 0

    @property
    def where(self) -> str:
        """Its file."""
        return str(self.all("PRAGMA database_list")[0][2]) or ":memory:"

    # ── transactions ──

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing, on disk when it ends. Raises StorageFull where the disk is full; nothing is then written."""
        with self.undone_if_raises():
            self.run("BEGIN IMMEDIATE")
            yield
            self.write_logs()
            self.run("COMMIT")

    @contextmanager
    def undone_if_raises(self) -> Iterator[None]:
        """A part of a transaction: whatever it raises, all of the transaction is rolled back."""
        try:
            yield
        except BaseException as error:  # tolerates nothing: whatever it was, no half of a transaction stays
            if self.connection.in_transaction:
                self.run("ROLLBACK")
            self._events.clear()
            self._counts.clear()
            self._rolled_back()
            if is_full(error):
                raise StorageFull(
                    "the disk of the run folder is full: free some space, the run then goes on"
                ) from error
            raise

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """One transition within a transaction: undone alone when it raises."""
        events, counts = len(self._events), len(self._counts)
        self.run("SAVEPOINT transition")
        try:
            yield
        except BaseException:
            del self._events[events:], self._counts[counts:]
            if self.connection.in_transaction:
                self.run("ROLLBACK TO transition")
                self.run("RELEASE transition")
            self._rolled_back()
            raise
        self.run("RELEASE transition")

    def _rolled_back(self) -> None:
        for forget in self.on_rollback:
            forget()

    # ── logs ──

    def event(
        self,
        now: float,
        kind: str,
        *,
        group: int | None = None,
        idx: int | None = None,
        policy: str | None = None,
        batch: int | None = None,
        **data: Any,
    ) -> None:
        self._events.append((now, kind, group, idx, policy, batch, _json(data) if data else None))
        self._write_logs_outside()

    def events(self, now: float, kind: str, rows: Sequence[tuple[int, int, dict[str, Any]]]) -> None:
        """One for each (group, index, data), in order."""
        self._events += [(now, kind, group, idx, None, None, _json(data)) for group, idx, data in rows]
        self._write_logs_outside()

    def count(self, name: str, by: float = 1) -> None:
        self._counts.append((name, by))
        self._write_logs_outside()

    def collected(self, kind: str, policy: str | None) -> list[dict[str, Any]]:
        """What events of this kind say that the transaction under way will write, in order."""
        return [
            msgspec.json.decode(data, type=dict)
            for _, each, _, _, of, _, data in self._events
            if (each, of) == (kind, policy) and data is not None
        ]

    def counter(self, name: str) -> float:
        row = self.one("SELECT value FROM counters WHERE name = ?", name)
        return (float(row[0]) if row else 0.0) + sum(by for each, by in self._counts if each == name)

    def write_logs(self) -> None:
        """What was collected: whoever ends a transaction himself calls this before, and not within a savepoint."""
        if self._events:
            self.run_many(ADD_EVENT, self._events)
            self._events.clear()
        if self._counts:
            sums: dict[str, float] = {}
            for name, by in self._counts:
                sums[name] = sums.get(name, 0) + by
            self.run_many(ADD_COUNT, list(sums.items()))
            self._counts.clear()

    def _write_logs_outside(self) -> None:
        """Without a transaction nobody would come to write them."""
        if not self.connection.in_transaction:
            self.write_logs()

    def get(self, key: str) -> Any:
        row = self.one("SELECT value FROM meta WHERE key = ?", key)
        return row[0] if row else None

    def set(self, key: str, value: Any) -> None:
        self.run("INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value))


def _json(data: dict[str, Any]) -> str:
    """A JSON object. What is not finite becomes null, which JSON can say."""
    return _ENCODER.encode(data).decode()


_ENCODER = msgspec.json.Encoder()
