"""Does the ledger balance? Recounted from the tables, whatever the transitions believe; the difference must be 0."""

from __future__ import annotations

import sqlite3
from typing import Any

ALIVE = ("open", "ready", "kept", "batched", "trained", "dropped", "stale")


def balance(db: sqlite3.Connection) -> dict[str, Any]:
    """Counts by state of episodes, groups per policy and samples, and ``difference``: the sum of what is amiss."""
    episodes, lost_episodes = _episodes(db)
    policies, lost_groups = _groups(db)
    samples, lost_samples = _samples(db)
    batches, lost_steps = _steps(db)
    twice = _number(
        db,
        "SELECT COUNT(*) FROM (SELECT g.group_id, g.use, b.policy FROM batch_groups g "
        "JOIN batches b ON b.id = g.batch WHERE b.state <> 'dropped' "
        "GROUP BY g.group_id, g.use, b.policy HAVING COUNT(*) > 1)",
    )
    difference = lost_episodes + lost_groups + lost_samples + lost_steps + twice
    return {
        "episodes": episodes,
        "policies": policies,
        "samples": samples,
        "batches": batches,
        "twice": twice,
        "difference": difference,
    }


def _number(db: sqlite3.Connection, sql: str, *values: object) -> int:
    return int(db.execute(sql, values).fetchone()[0] or 0)


def _episodes(db: sqlite3.Connection) -> tuple[dict[str, int], int]:
    """Admitted episodes are each in one state, and a group knows how many of its own have not ended."""
    states = dict(db.execute("SELECT state, COUNT(*) FROM episodes GROUP BY state").fetchall())
    admitted = _number(db, "SELECT SUM(size) FROM groups")
    wrong = _number(
        db,
        "SELECT COUNT(*) FROM (SELECT g.id FROM groups g LEFT JOIN episodes e ON e.group_id = g.id GROUP BY g.id "
        "HAVING g.left_episodes <> SUM(e.state IN ('pending', 'leased')) "
        "OR (g.state = 'open') <> (g.left_episodes > 0) OR COUNT(e.idx) <> g.size)",
    )
    without = _number(
        db,
        "SELECT COUNT(*) FROM episodes e LEFT JOIN payloads p ON p.group_id = e.group_id AND p.idx = e.idx "
        "WHERE e.state = 'done' AND p.id IS NULL AND e.group_id NOT IN (SELECT group_id FROM pruned_groups)",
    )
    return {"admitted": admitted, **states}, abs(admitted - sum(states.values())) + wrong + without


def _groups(db: sqlite3.Connection) -> tuple[dict[str, dict[str, int]], int]:
    """Per trainable policy: admitted = open + ready + kept + batched + trained + dropped + stale. Of one that joined
    later, the groups since then."""
    difference = 0
    policies: dict[str, dict[str, int]] = {}
    for (policy,) in db.execute("SELECT name FROM policies WHERE trainable ORDER BY name").fetchall():
        counts = dict.fromkeys(ALIVE, 0)
        counts.update(
            db.execute("SELECT state, COUNT(*) FROM group_policy WHERE policy = ? GROUP BY state", (policy,)).fetchall()
        )
        admitted = _number(
            db,
            "SELECT COUNT(*) FROM groups WHERE purpose = 'train' AND id > COALESCE("
            "(SELECT json_extract(value, '$.since') FROM meta WHERE key = 'added/' || ?), 0)",
            policy,
        )
        policies[policy] = {"admitted": admitted, **counts}
        difference += abs(admitted - sum(counts.values()))
    # A settled group is nowhere open; one in a batch is where its batch is.
    difference += _number(
        db,
        "SELECT COUNT(*) FROM group_policy p JOIN groups g ON g.id = p.group_id "
        "WHERE (g.state = 'closed') <> (p.state NOT IN ('open', 'ready'))",
    )
    difference += _number(
        db,
        "SELECT COUNT(*) FROM group_policy p LEFT JOIN batches b ON b.id = p.batch "
        "WHERE (p.state = 'batched' AND COALESCE(b.state, '') NOT IN ('cut', 'issued')) "
        "OR (p.state = 'trained' AND COALESCE(b.state, '') <> 'committed')",
    )
    return policies, difference


def _samples(db: sqlite3.Connection) -> tuple[dict[str, int], int]:
    """Samples stored = trained + masked + dropped + stale + held, each as its group is."""
    counts = dict.fromkeys(("held", "trained", "masked", "dropped", "stale"), 0)
    counts.update(db.execute("SELECT state, COUNT(*) FROM samples GROUP BY state").fetchall())
    stored = _number(db, "SELECT SUM(samples) FROM episodes")
    wrong = _number(
        db,
        "SELECT COUNT(*) FROM samples s LEFT JOIN group_policy p ON p.group_id = s.group_id AND p.policy = s.policy "
        "WHERE s.state <> CASE p.state WHEN 'trained' THEN CASE WHEN s.mask IS NULL THEN 'trained' ELSE 'masked' END "
        "WHEN 'dropped' THEN 'dropped' WHEN 'stale' THEN 'stale' ELSE 'held' END OR p.state IS NULL",
    )
    return {"stored": stored, **counts}, abs(stored - sum(counts.values())) + wrong


def _steps(db: sqlite3.Connection) -> tuple[dict[str, int], int]:
    """Version v of a policy is v committed batches, one from each version below."""
    counts = dict(db.execute("SELECT state, COUNT(*) FROM batches GROUP BY state").fetchall())
    difference = 0
    for policy, version in db.execute("SELECT name, version FROM policies WHERE trainable").fetchall():
        committed = [
            row[0]
            for row in db.execute(
                "SELECT version FROM batches WHERE policy = ? AND state = 'committed' ORDER BY version", (policy,)
            )
        ]
        difference += len(set(committed) ^ set(range(version))) + len(committed) - len(set(committed))
    return counts, difference
