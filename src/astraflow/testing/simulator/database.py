"""A ledger file that survives the process that writes it, and a second connection that sees what is on disk.

``Crasher`` is the connection that the ledger gets. On command it kills the process in the middle of a transaction: the
statement raises, the transaction is rolled back as SQLite does when a process dies, and the connection is dead.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from astraflow.testing.simulator.edges import watch
from astraflow.testing.simulator.process import Killed

C = TypeVar("C", bound=sqlite3.Connection)


class Database:
    """One run's database. ``keeper`` is the second connection: what a transaction has changed it sees once that is on
    disk, and not before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.keeper = self._open_file(sqlite3.Connection)
        self.keeper.execute("PRAGMA journal_mode = WAL")
        schema = resources.files("astraflow.dataflow").joinpath("schema.sql").read_text()
        self.keeper.executescript(schema)
        watch(self.keeper)
        self.room: int | None = None
        """So many statements may still write before the disk is full, in the words of SQLite; None: it never is."""
        self._open: list[Crasher] = []
        self._fuse: int | None = None
        self._boom: Callable[[], None] = lambda: None
        self._at_commit: Callable[[], None] | None = None

    def connect(self) -> Crasher:
        connection = self._open_file(Crasher)
        connection.database = self
        connection.execute("PRAGMA synchronous = OFF")  # a process dies here, no machine: what it wrote survives it
        self._open.append(connection)
        return connection

    def _open_file(self, kind: type[C]) -> C:
        return sqlite3.connect(self._path, isolation_level=None, cached_statements=512, factory=kind)

    @property
    def armed(self) -> bool:
        """Some statement will fail."""
        return self._fuse is not None or self.room is not None

    @property
    def is_writing(self) -> bool:
        """A transaction is decided and not on disk; whoever asked for it has no answer yet."""
        return any(connection.in_transaction for connection in self._open)

    def light_fuse(self, statements: int, boom: Callable[[], None]) -> None:
        """After so many further statements within transactions the process dies; ``boom`` tells its supervisor."""
        self._fuse = statements
        self._boom = boom

    def die_when_written(self, boom: Callable[[], None]) -> None:
        """The next transaction gets to the disk, and nobody hears of it: the process dies right then."""
        self._at_commit = boom

    def snuff(self) -> None:
        self._fuse = self._at_commit = None

    def committed(self) -> None:
        """Called after every COMMIT."""
        if self._at_commit is not None:
            boom, self._at_commit = self._at_commit, None
            boom()
            raise Killed

    def kill(self) -> None:
        """The process is gone: open transactions are rolled back, its connections answer no more."""
        self.snuff()
        for connection in self._open:
            connection.dead = True
            sqlite3.Connection.close(connection)
        self._open.clear()

    def close(self) -> None:
        self.kill()
        self.keeper.close()

    def count(self, statement: str) -> None:
        """Called before every statement that runs inside a transaction."""
        if self.room is not None and statement.split(maxsplit=1)[0] in ("INSERT", "UPDATE", "COMMIT"):
            self.room -= 1
            if self.room < 0:
                raise sqlite3.OperationalError("database or disk is full")
        if self._fuse is None:
            return
        self._fuse -= 1
        if self._fuse < 0:
            self._fuse = None
            self._boom()
            raise Killed


class Crasher(sqlite3.Connection):
    """A connection that dies with its process."""

    database: Database
    dead = False

    def execute(self, *args: Any, **kwargs: Any) -> sqlite3.Cursor:
        if self.dead or self.database.armed:
            self._live(args[0])
        cursor = super().execute(*args, **kwargs)
        if args[0] == "COMMIT":
            self.database.committed()
        return cursor

    def executemany(self, *args: Any, **kwargs: Any) -> sqlite3.Cursor:
        self._live(args[0])
        return super().executemany(*args, **kwargs)

    def executescript(self, *args: Any, **kwargs: Any) -> sqlite3.Cursor:
        self._live(args[0])
        return super().executescript(*args, **kwargs)

    def commit(self) -> None:
        self._live("COMMIT")
        super().commit()

    def close(self) -> None:
        if not self.dead:
            super().close()

    @property
    def in_transaction(self) -> bool:
        return not self.dead and super().in_transaction

    def _live(self, statement: str) -> None:
        if self.dead:
            raise Killed
        if self.in_transaction:
            self.database.count(statement)
