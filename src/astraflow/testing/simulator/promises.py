"""Nobody is answered before it is on disk: each answer is held against what another connection to the file sees.

Whatever dies after an answer has left, what it promised must be found by the next process.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from astraflow.types import Outcome
from astraflow.wire import messages as m


def not_on_disk(db: sqlite3.Connection, request: Any, reply: Any) -> str | None:
    """What is missing, in words. Later transactions may have gone on from there, never back behind it."""
    match request, reply:
        case m.LeaseRequest(), m.LeaseReply():
            for lease in reply.leases:
                if _number(db, "SELECT attempt FROM episodes WHERE group_id = ? AND idx = ?", lease) < lease.attempt:
                    return f"lease {lease.id} was given, the disk does not have that attempt"
        case m.SubmitRequest(), m.SubmitReply():
            if _number(db, "SELECT submitted FROM episodes WHERE group_id = ? AND idx = ?", request) < request.attempt:
                what = "failure" if request.episode.outcome is Outcome.FAILED else "result"
                return f"the {what} of {request.group}/{request.index}/{request.attempt} was acknowledged, not stored"
        case m.ResumeRequest(), m.ResumeReply():
            (epoch,) = db.execute("SELECT trainer_epoch FROM policies WHERE name = ?", (request.policy,)).fetchone()
            if epoch < reply.trainer_epoch:
                return f"trainer epoch {reply.trainer_epoch} of {request.policy} was given, the disk has {epoch}"
        case m.BatchRequest(), m.BatchReply(batch=batch) if batch is not None:
            issued = "SELECT COUNT(*) FROM events WHERE kind = 'issued' AND batch = ?"
            if not db.execute(issued, (batch.id,)).fetchone()[0]:
                return f"batch {batch.id} was issued, the disk does not have it"
        case m.CommitRequest(), m.CommitReply():
            ended = "SELECT COUNT(*) FROM events WHERE kind IN ('committed', 'batch_dropped') AND batch = ?"
            if not db.execute(ended, (request.batch,)).fetchone()[0]:
                return f"the commit of batch {request.batch} was acknowledged, not stored"
    return None


def _number(db: sqlite3.Connection, query: str, place: Any) -> int:
    row = db.execute(query, (place.group, place.index)).fetchone()
    return -1 if row is None else int(row[0])
