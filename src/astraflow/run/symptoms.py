"""A run's ledger as ``observe.doctor`` wants it: read-only, beside a run or after it."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from typing import Any

import numpy as np

from astraflow.errors import ConfigError
from astraflow.observe.doctor import RECENT_GROUPS
from astraflow.observe.findings import RECENT_STEPS, Symptoms
from astraflow.run.config import read_config
from astraflow.run.layout import COPY, RunFolder
from astraflow.run.over import is_alive, stored_state
from astraflow.run.run_db import open_run_db

NO_SIGNAL = ("zero_variance", "no_baseline", "zero_advantage", "no_signal")
"""Reasons of Keep for want of signal, and that of a batch that had none."""
NOT_JUDGED = ("surplus", "too_few", "not_played", "rolled_back", "non_finite")
"""Drops that say nothing of the group: of episodes that failed, of the queue, of other groups in the batch."""
ENDED = "policy = ?1 AND state IN ('committed', 'dropped') AND COALESCE(reason, '') <> 'rolled_back'"
"""Batches of the policy that count."""
OF_A_BATCH = "(p.batch IS NOT NULL AND COALESCE(p.reason, '') <> 'rolled_back')"
"""Kept when it was judged, and cut; what became of the batch says nothing of it."""


def symptoms_of(run: RunFolder) -> list[Symptoms]:
    """One per trainable policy. Raises ConfigError unless it is the folder of a run that was started."""
    stored = read_config(run.path)
    try:
        bounds = {name: int(policy["max_staleness"]) for name, policy in stored["config"]["policies"].items()}
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{run.config} does not hold a run's config: {error!r} is missing or no number; {COPY}"
        ) from error
    state, cause = stored_state(run)
    failed = (cause or "without a cause") if state == "failed" else ""
    alive = is_alive(run)
    with open_run_db(run.database) as db:
        names = db.connection.execute("SELECT name FROM policies WHERE trainable = 1 ORDER BY name").fetchall()
        joined = db.joined()  # each has the settings of the one that it is like
        found = [_symptoms(db.connection, name, bounds[joined.get(name, name)]) for (name,) in names]
        absent = {name: _absent(db.connection, name) if alive else "" for (name,) in names}
    return [replace(each, failed=failed, absent=absent[each.policy]) for each in found]


def _absent(db: sqlite3.Connection, policy: str) -> str:
    """Who was declared dead, and that no one has taken his place."""
    rows = db.execute(
        "SELECT c.name FROM trainers t JOIN components c ON c.component = 'trainer' AND c.name = t.name "
        "WHERE t.policy = ? AND c.state = 'dead'",
        (policy,),
    ).fetchall()
    workers = dict(
        db.execute("SELECT state, COUNT(*) FROM components WHERE component = 'rollout' GROUP BY state").fetchall()
    )
    parts = [f"its trainer {name} is dead" for (name,) in rows]
    if workers.get("dead") and not workers.get("alive"):
        parts.append("no rollout service is alive")
    return "; ".join(parts)


def _symptoms(db: sqlite3.Connection, policy: str, max_staleness: int) -> Symptoms:
    groups, flat, stale = _groups(db, policy)
    trained, masked = _tokens(db, policy)
    ended = db.execute(
        f"SELECT reason FROM batches WHERE {ENDED} ORDER BY id DESC LIMIT ?2",
        (policy, RECENT_STEPS),
    ).fetchall()
    given_up = dict(
        db.execute(
            "SELECT COALESCE(kind, 'unknown'), COUNT(*) FROM episodes WHERE lane = 0 AND state = 'given_up' "
            "AND COALESCE(kind, '') <> 'cancelled' GROUP BY kind"
        ).fetchall()
    )
    (done,) = db.execute("SELECT COUNT(*) FROM episodes WHERE lane = 0 AND state = 'done'").fetchone()
    series = _series(db, policy)
    return Symptoms(
        policy=policy,
        max_staleness=max_staleness,
        steps=max(len(series.get(name, ())) for name in ("step/lr", "critic/lr")),
        groups=groups,
        flat=flat,
        left_out=_left_out(db, policy),
        stale_groups=stale,
        trained_tokens=trained,
        masked_tokens=masked,
        batches=len(ended),
        skipped=_counted(reason for (reason,) in ended if reason is not None),
        episodes=done + sum(given_up.values()),
        given_up=given_up,
        series=series,
    )


def _groups(db: sqlite3.Connection, policy: str) -> tuple[int, dict[str, int], int]:
    """Judged groups, whatever became of their batch, those without variance by where their reward lies, and groups that
    went stale; recent ones."""
    lowest, highest = db.execute(
        "SELECT MIN(score), MAX(score) FROM episodes WHERE lane = 0 AND state = 'done' AND supervised = 0"
    ).fetchone()
    reasons = ", ".join("?" * len(NO_SIGNAL))
    rows = db.execute(
        "SELECT p.state, p.reason, p.reward, p.verdict FROM group_policy p JOIN groups g ON g.id = p.group_id "
        "WHERE p.policy = ? AND g.purpose = 'train' AND g.supervised = 0 AND (p.state IN ('kept', 'batched', "
        f"'trained', 'stale') OR p.reason IN ({reasons}) OR {OF_A_BATCH}) ORDER BY p.group_id DESC LIMIT ?",
        (policy, *NO_SIGNAL, RECENT_GROUPS),
    ).fetchall()
    stale = sum(state == "stale" for state, *_ in rows)
    flat = [
        _place(reason, reward, lowest, highest)
        for state, reason, reward, verdict in rows
        if state != "stale" and _is_flat(reason, verdict)
    ]
    return len(rows) - stale, _counted(flat), stale


def _left_out(db: sqlite3.Connection, policy: str) -> dict[str, int]:
    """Groups that Keep dropped otherwise than for want of signal, by reason; of the recent ones that it judged."""
    unjudged = ", ".join("?" * len(NOT_JUDGED))
    rows = db.execute(
        "SELECT p.state = 'dropped' AND p.batch IS NULL, p.reason FROM group_policy p "
        "JOIN groups g ON g.id = p.group_id WHERE p.policy = ? AND g.purpose = 'train' AND g.supervised = 0 "
        "AND p.state IN ('kept', 'batched', 'trained', 'stale', 'dropped') "
        f"AND (COALESCE(p.reason, '') NOT IN ({unjudged}) OR {OF_A_BATCH}) ORDER BY p.group_id DESC LIMIT ?",
        (policy, *NOT_JUDGED, RECENT_GROUPS),
    ).fetchall()
    return _counted(reason for left_out, reason in rows if left_out and reason not in NO_SIGNAL)


def _is_flat(reason: str | None, verdict: bytes | None) -> bool:
    """Dropped for it, or kept all the same with advantages that are all 0."""
    return reason in NO_SIGNAL or (bool(verdict) and not np.frombuffer(verdict or b"", np.float32).any())


def _place(reason: str | None, reward: float | None, lowest: float | None, highest: float | None) -> str:
    if reason == "no_baseline":
        return "alone"
    if reward is None or lowest is None or highest is None:
        return "between"
    if lowest == highest:
        return "only"
    return "lowest" if reward <= lowest else "highest" if reward >= highest else "between"


def _tokens(db: sqlite3.Connection, policy: str) -> tuple[int, dict[str, int]]:
    """Of the groups in recent steps, and in recent batches that made none: tokens with a gradient, and without one by
    reason."""
    rows = db.execute(
        "SELECT s.mask, SUM(s.tokens) FROM samples s JOIN group_policy p ON p.group_id = s.group_id AND "
        "p.policy = s.policy WHERE s.policy = ?1 AND ((p.state = 'trained' AND "
        "p.version > (SELECT version FROM policies WHERE name = ?1) - ?2) OR (p.state = 'dropped' AND p.batch IN "
        f"(SELECT id FROM batches WHERE {ENDED} ORDER BY id DESC LIMIT ?2))) GROUP BY 1",
        (policy, RECENT_STEPS),
    ).fetchall()
    masked = {reason: tokens for reason, tokens in rows if reason is not None}
    return sum(tokens for reason, tokens in rows if reason is None), masked


def _series(db: sqlite3.Connection, policy: str) -> dict[str, list[float]]:
    """Of the surviving history."""
    found: dict[str, list[float]] = {}
    rows = db.execute(
        "SELECT metrics FROM batches WHERE policy = ? AND state = 'committed' ORDER BY version, id", (policy,)
    )
    for (text,) in rows:
        metrics: dict[str, float] = json.loads(text) if text else {}
        for name, value in metrics.items():
            found.setdefault(name, []).append(value)
    return found


def _counted(names: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts
