"""A ledger file that survives the process that writes it: a shared in-memory database and a second connection.

``Crasher`` is the connection that the ledger gets. On command it kills the process in the middle of a transaction: the
statement raises, the transaction is rolled back as SQLite does when a process dies, and the connection is dead.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable
from importlib import resources
from typing import Any

from astraflow.testing.simulator.edges import watch
from astraflow.testing.simulator.process import Killed

_NUMBERS = itertools.count()


class Database:
    """One run's database. ``keeper`` is the second connection: it keeps the data alive and looks on."""

    def __init__(self) -> None:
        self.uri = f"file:astraflow-sim-{next(_NUMBERS)}?mode=memory&cache=shared"
        self.keeper = sqlite3.connect(self.uri, uri=True, isolation_level=None)
        schema = resources.files("astraflow.dataflow").joinpath("schema.sql").read_text()
        self.keeper.executescript(schema)
        watch(self.keeper)
        self.room: int | None = None
        """So many statements may still write before the disk is full, in the words of SQLite; None: it never is."""
        self._open: list[Crasher] = []
        self._fuse: int | None = None
        self._boom: Callable[[], None] = lambda: None

    def connect(self) -> Crasher:
        connection = sqlite3.connect(self.uri, uri=True, isolation_level=None, factory=Crasher)
        connection.database = self
        self._open.append(connection)
        return connection

    def light_fuse(self, statements: int, boom: Callable[[], None]) -> None:
        """After so many further statements within transactions the process dies; ``boom`` tells its supervisor."""
        self._fuse = statements
        self._boom = boom

    def snuff(self) -> None:
        self._fuse = None

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
        self._live(args[0])
        return super().execute(*args, **kwargs)

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
