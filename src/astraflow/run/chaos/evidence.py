"""What a run leaves behind, read from its folder: events as they come, the ledger's claims, the trainers' record."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from astraflow.dataflow.conservation import balance
from astraflow.run.chaos.injury import Sighting
from astraflow.run.chaos.judge import Claims, Use
from astraflow.run.layout import RunFolder
from astraflow.trainer.checkpoints import Checkpoints, TrainedStep, read_trained

SEEN = ("done", "committed", "resumed", "dead", "joined", "dataflow_started")
LATE_S = 10.0
"""What could have ended so long before the run did, and has not, never will."""


class Tail:
    """Events of a run's ledger since the last look, beside the dataflow that writes them."""

    def __init__(self, run: RunFolder) -> None:
        self._database = run.database
        self._connection: sqlite3.Connection | None = None
        self._last = 0

    def look(self) -> list[Sighting]:
        """Nothing while the file cannot be read: whoever waits has a deadline of his own."""
        try:
            if self._connection is None:
                if not self._database.exists():
                    return []
                self._connection = _open(self._database)
            rows = self._connection.execute(
                "SELECT id, kind, policy, CASE kind WHEN 'done' THEN json_extract(data, '$.worker') "
                "WHEN 'dead' THEN json_extract(data, '$.name') WHEN 'joined' THEN json_extract(data, '$.name') END "
                "FROM events WHERE id > ? ORDER BY id",
                (self._last,),
            ).fetchall()
        except sqlite3.OperationalError:
            self.close()
            return []
        if not rows:
            return []
        self._last = rows[-1][0]
        now = time.monotonic()
        return [
            Sighting(at=now, kind=kind, name=name or policy or "") for _, kind, policy, name in rows if kind in SEEN
        ]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def read_versions(run: RunFolder) -> dict[str, int]:
    """Of every trainable policy."""
    with closing(_open(run.database)) as db:
        return dict(db.execute("SELECT name, version FROM policies WHERE trainable").fetchall())


def count_undone(run: RunFolder) -> int:
    """Committed steps that were un-committed so far."""
    with closing(_open(run.database)) as db:
        return int(db.execute("SELECT COUNT(*) FROM events WHERE kind = 'undone'").fetchone()[0])


def read_histories(run: RunFolder, policies: Sequence[str]) -> dict[str, list[TrainedStep]]:
    """What is in the weights that survived: the newest complete checkpoint of each policy."""
    found = {}
    for policy in policies:
        newest = Checkpoints(run.checkpoints / policy, kept=1).newest()
        found[policy] = [] if newest is None else read_trained(newest[1])
    return found


def read_claims(run: RunFolder) -> Claims:
    """Of a run that has ended; of one that has not, nothing need have ended."""
    with closing(_open(run.database)) as db:
        policies = [name for (name,) in db.execute("SELECT name FROM policies WHERE trainable")]
        trained = {policy: _first_uses(db, policy) | _replays(db, policy) for policy in policies}
        return Claims(trained=trained, without_end=_without_end(db), difference=balance(db)["difference"])


def _first_uses(db: sqlite3.Connection, policy: str) -> frozenset[Use]:
    """By the state of the sample, and by the batch that its group was cut into: either alone is a claim."""
    return frozenset(
        (f"{group}/{idx}/{agent}/{n}", 0)
        for group, idx, agent, n in db.execute(
            "SELECT group_id, idx, agent, n FROM samples WHERE policy = ?1 AND state = 'trained' "
            "UNION SELECT s.group_id, s.idx, s.agent, s.n FROM batches b "
            "JOIN batch_groups g ON g.batch = b.id AND g.use = 0 "
            "JOIN samples s ON s.group_id = g.group_id AND s.policy = b.policy "
            "WHERE b.policy = ?1 AND b.state = 'committed' AND s.mask IS NULL",
            (policy,),
        )
    )


def _replays(db: sqlite3.Connection, policy: str) -> frozenset[Use]:
    """Samples of one group differ in age: what had become too old has no row in the later use, only in the earlier.
    That is said by the event of the cut, as the mask of a sample is about its first use."""
    return frozenset(
        (f"{group}/{idx}/{agent}/{n}", use)
        for group, idx, agent, n, use in db.execute(
            "SELECT s.group_id, s.idx, s.agent, s.n, g.use FROM batches b "
            "JOIN batch_groups g ON g.batch = b.id AND g.use > 0 "
            "JOIN events e ON e.kind = 'cut' AND e.batch = b.id "
            "JOIN samples s ON s.group_id = g.group_id AND s.policy = b.policy "
            "WHERE b.policy = ? AND b.state = 'committed' AND NOT EXISTS ("
            "SELECT 1 FROM json_each(e.data, '$.not_again') WHERE value = "
            "s.group_id || '/' || s.idx || '/' || s.agent || '/' || s.n)",
            (policy,),
        )
    )


def _without_end(db: sqlite3.Connection) -> list[str]:
    (end,) = db.execute("SELECT MAX(at) FROM events WHERE kind IN ('finished', 'failed_run')").fetchone()
    if end is None:
        return []
    found = []
    for what, sql in (
        (
            "episode {}/{} is leased, and its lease ran out long ago",
            "SELECT group_id, idx FROM episodes WHERE state = 'leased' AND expires_at < ?",
        ),
        (
            "group {} has all its episodes and was never settled ({})",
            "SELECT id, state FROM groups WHERE state = 'ready' AND ended_at < ?",
        ),
        (
            "batch {} of {} was cut long ago and never ended",
            "SELECT id, policy FROM batches WHERE state IN ('cut', 'issued') AND cut_at < ?",
        ),
    ):
        found += [what.format(*row) for row in db.execute(sql, (end - LATE_S,))]
    return found


def _open(database: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    connection.execute("PRAGMA busy_timeout = 5000")
    return connection
