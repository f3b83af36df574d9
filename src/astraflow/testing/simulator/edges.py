"""Every change of state that the ledger makes, seen from outside by triggers: which edges were taken, which may be.

The triggers write in the ledger's own transactions, so an edge that was rolled back was not taken.
"""

from __future__ import annotations

import sqlite3

Edge = tuple[str, str, str]
"""(table, from, to); ``from`` is empty where the row is new."""

TABLES = ("episodes", "groups", "group_policy", "samples", "batches", "evals")

ALLOWED: frozenset[Edge] = frozenset(
    (table, old, new)
    for table, pairs in {
        "episodes": "-pending pending-leased leased-pending leased-done leased-given_up pending-done pending-given_up",
        "groups": "-open open-ready ready-closed open-closed",
        "group_policy": "-open open-ready open-stale ready-kept ready-dropped ready-stale kept-batched kept-dropped "
        "kept-stale batched-trained batched-dropped trained-batched trained-dropped",
        "samples": "-held held-trained held-masked held-dropped held-stale trained-held masked-held trained-dropped "
        "masked-dropped",
        "batches": "-cut cut-issued issued-committed issued-dropped issued-cut committed-cut committed-dropped "
        "cut-dropped",
        "evals": "-open open-done",
    }.items()
    for old, new in (pair.split("-") for pair in pairs.split())
)
"""The diagrams at the head of dataflow/schema.sql. Anything else is a bug."""


def watch(connection: sqlite3.Connection) -> None:
    """Install the observers. The ledger's tables must exist."""
    connection.execute(
        "CREATE TABLE IF NOT EXISTS sim_edges (tbl TEXT, old TEXT, new TEXT, n INTEGER, PRIMARY KEY (tbl, old, new))"
    )
    for table in TABLES:
        count = (
            "INSERT INTO sim_edges VALUES ('{table}', {old}, NEW.state, 1) "
            "ON CONFLICT (tbl, old, new) DO UPDATE SET n = n + 1"
        )
        connection.execute(
            f"CREATE TRIGGER IF NOT EXISTS sim_new_{table} AFTER INSERT ON {table} "
            f"BEGIN {count.format(table=table, old=chr(39) * 2)}; END"
        )
        connection.execute(
            f"CREATE TRIGGER IF NOT EXISTS sim_edge_{table} AFTER UPDATE OF state ON {table} "
            f"WHEN OLD.state <> NEW.state BEGIN {count.format(table=table, old='OLD.state')}; END"
        )
    connection.commit()


def taken(connection: sqlite3.Connection) -> dict[Edge, int]:
    """How often each edge was taken."""
    return {(table, old, new): n for table, old, new, n in connection.execute("SELECT * FROM sim_edges")}
