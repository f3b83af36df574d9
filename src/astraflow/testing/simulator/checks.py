"""What must be true of a ledger at any moment, and of a run at its end. Each check returns what is broken, in words.

They are written against the tables, not with the ledger's own queries: a bug there must not hide itself here.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from astraflow.dataflow.verify import verify
from astraflow.testing.simulator.edges import ALLOWED, taken
from astraflow.testing.simulator.history import History
from astraflow.testing.simulator.parts import LIMITS

if TYPE_CHECKING:
    from astraflow.testing.fake_backend import FakeBackend

ENDED = "('done', 'given_up')"
SAMPLES_OF = {
    "trained": {"trained", "masked"},
    "dropped": {"dropped"},
    "stale": {"stale"},
    "open": {"held"},
    "ready": {"held"},
    "kept": {"held"},
    "batched": {"held"},
}
"""State of a group for a policy → states that its samples may then have."""


def check_ledger(db: sqlite3.Connection) -> list[str]:
    """At any moment between two transactions."""
    checks: tuple[Callable[[sqlite3.Connection], list[str]], ...] = (
        _episodes_of_groups,
        _groups_of_policies,
        _samples_of_groups,
        _batches_of_policies,
        _publications,
        _tasks,
        _edges,
    )
    return [problem for check in checks for problem in check(db)]


def _episodes_of_groups(db: sqlite3.Connection) -> list[str]:
    rows = db.execute(
        "SELECT g.id, g.state, g.size, g.left_episodes, COUNT(e.idx), "
        f"SUM(e.state NOT IN {ENDED}) FROM groups g LEFT JOIN episodes e ON e.group_id = g.id GROUP BY g.id"
    )
    problems = []
    for group, state, size, left, members, unfinished in rows:
        if members != size:
            problems.append(f"group {group} has {members} episodes, its size is {size}")
        if left != unfinished:
            problems.append(f"group {group} says {left} episodes are left, {unfinished} are")
        if (state == "open") != (unfinished > 0):
            problems.append(f"group {group} is {state} with {unfinished} episodes not ended")
    orphans = db.execute(
        "SELECT COUNT(*) FROM payloads p LEFT JOIN episodes e ON e.group_id = p.group_id AND e.idx = p.idx "
        "WHERE e.idx IS NULL"
    ).fetchone()[0]
    return problems + ([f"{orphans} payloads belong to no episode"] if orphans else [])


def _groups_of_policies(db: sqlite3.Connection) -> list[str]:
    """Groups admitted = open + ready + kept + batched + trained + dropped + stale, for every trainable policy."""
    problems = []
    admitted = db.execute("SELECT COUNT(*) FROM groups WHERE purpose = 'train'").fetchone()[0]
    for (policy,) in db.execute("SELECT name FROM policies WHERE trainable").fetchall():
        counted = db.execute(
            "SELECT COUNT(*) FROM group_policy p JOIN groups g ON g.id = p.group_id "
            "WHERE p.policy = ? AND g.purpose = 'train'",
            (policy,),
        ).fetchone()[0]
        if counted != admitted:
            problems.append(f"{policy}: {admitted} groups admitted, {counted} are in some state")
    for group, policy, state, reason in db.execute(
        "SELECT p.group_id, p.policy, p.state, p.reason FROM group_policy p JOIN groups g ON g.id = p.group_id "
        "WHERE (p.state = 'dropped' AND p.reason IS NULL) OR (g.state = 'closed' AND p.state IN ('open', 'ready')) "
        "OR (p.state IN ('batched', 'trained') AND p.batch IS NULL) OR g.purpose = 'eval'"
    ):
        problems.append(f"group {group} is {state} ({reason}) for {policy}: no reason, no batch, or never settled")
    return problems


def _samples_of_groups(db: sqlite3.Connection) -> list[str]:
    """Samples stored = trained + masked + dropped + stale + held, each as its group is."""
    problems = []
    for state, sample, group, policy in db.execute(
        "SELECT DISTINCT p.state, s.state, s.group_id, s.policy FROM samples s "
        "JOIN group_policy p ON p.group_id = s.group_id AND p.policy = s.policy"
    ):
        if sample not in SAMPLES_OF[state]:
            problems.append(f"group {group} is {state} for {policy}, a sample of it is {sample}")
    return problems


def _batches_of_policies(db: sqlite3.Connection) -> list[str]:
    """Versions are the committed batches, one each, from 0 without a gap; a group is in one living batch at most."""
    problems = []
    for policy, version in db.execute("SELECT name, version FROM policies WHERE trainable").fetchall():
        committed = [
            row[0]
            for row in db.execute(
                "SELECT version FROM batches WHERE policy = ? AND state = 'committed' ORDER BY version", (policy,)
            )
        ]
        if committed != list(range(version)):
            problems.append(f"{policy} is at version {version}, its committed batches start from {committed}")
    for group, policy, count in db.execute(
        "SELECT b.group_id, t.policy, COUNT(*) FROM batch_groups b JOIN batches t ON t.id = b.batch "
        "WHERE b.use = 0 AND t.state <> 'dropped' GROUP BY b.group_id, t.policy HAVING COUNT(*) > 1"
    ):
        problems.append(f"group {group} is fresh in {count} living batches of {policy}")
    for group, policy, state, batch in db.execute(
        "SELECT p.group_id, p.policy, p.state, t.state FROM group_policy p JOIN batches t ON t.id = p.batch "
        "WHERE (p.state = 'trained' AND (t.state <> 'committed' OR p.version <> t.version + 1)) "
        "OR (p.state = 'batched' AND t.state NOT IN ('cut', 'issued'))"
    ):
        problems.append(f"group {group} is {state} for {policy} in a batch that is {batch}")
    return problems


def _publications(db: sqlite3.Connection) -> list[str]:
    problems = []
    for policy, serial, version in db.execute("SELECT name, serial, version FROM policies").fetchall():
        serials = [row[0] for row in db.execute("SELECT serial FROM publications WHERE policy = ?", (policy,))]
        newest = db.execute(
            "SELECT version FROM publications WHERE policy = ? ORDER BY serial DESC LIMIT 1", (policy,)
        ).fetchone()
        if serials and (max(serials) != serial or len(set(serials)) != len(serials)):
            problems.append(f"{policy} is at serial {serial}, published are {sorted(serials)}")
        if newest is not None and newest[0] != version:
            problems.append(f"{policy} is at version {version}, its newest publication is of {newest[0]}")
    return problems


def _tasks(db: sqlite3.Connection) -> list[str]:
    """The supply is unbounded and in order: what a restart forgets or repeats shows as a gap or a double."""
    keys = [
        row[0]
        for row in db.execute(
            "SELECT task_key FROM groups WHERE purpose = 'train' AND task_key LIKE 'q%' ORDER BY id"
        ).fetchall()
    ]
    expected = [f"q{index}" for index in range(len(keys))]
    if keys == expected:
        return []
    at = next(n for n, (found, wanted) in enumerate(zip(keys, expected, strict=True)) if found != wanted)
    return [f"admitted task number {at} is {keys[at]}, expected {expected[at]}"]


def _edges(db: sqlite3.Connection) -> list[str]:
    return [
        f"{table}: {old or 'new'} -> {new} is no edge of the diagram" for table, old, new in taken(db).keys() - ALLOWED
    ]


# ── at the end ──


def check_end(
    db: sqlite3.Connection,
    history: History,
    backends: Mapping[str, FakeBackend],
    *,
    steps: int,
    max_staleness: Mapping[str, int],
) -> list[str]:
    """Of a run that finished. ``backends``: what each trainer would find if it were started once more."""
    problems = [*history.broken, *check_ledger(db), *verify(db).differences]
    problems += _heard_after_pauses(db, history)
    for policy, backend in backends.items():
        problems += _trained_once(db, policy, backend)
        version = db.execute("SELECT version FROM policies WHERE name = ?", (policy,)).fetchone()[0]
        if version != steps:
            problems.append(f"{policy} ended with {version} commits, {steps} were asked for")
        oldest = max(backend.ages, default=0)
        if oldest > max_staleness[policy]:
            problems.append(f"{policy} trained a row of staleness {oldest}, the bound is {max_staleness[policy]}")
    stored = {
        (group, index)
        for group, index in db.execute("SELECT group_id, idx FROM episodes WHERE state IN ('done', 'given_up')")
    }
    lost = history.acknowledged - stored
    if lost:
        problems.append(f"{len(lost)} acknowledged episodes are not in the ledger: {sorted(lost)[:5]}")
    return problems


def _heard_after_pauses(db: sqlite3.Connection, history: History) -> list[str]:
    """Whoever is silent right after dataflow was stopped could not be heard: nobody is dead before a full new term."""
    return [
        f"{dead} components were declared dead within a term after dataflow had been stopped until {woken:.1f}"
        for woken in history.woken
        for (dead,) in db.execute(
            "SELECT COUNT(*) FROM events WHERE kind = 'dead' AND at >= ? - 1 AND at < ? + ? - 1",
            (woken, woken, LIMITS.dead_after_s),
        )
        if dead
    ]


def _trained_once(db: sqlite3.Connection, policy: str, backend: FakeBackend) -> list[str]:
    """The trainer's own surviving record decides; the ledger must tell the same story."""
    problems = []
    twice = {key: count for key, count in backend.trained.items() if count > 1}
    if twice:
        problems.append(f"{policy} trained {len(twice)} samples twice: {sorted(twice)[:3]}")
    committed = [
        row[0]
        for row in db.execute(
            "SELECT id FROM batches WHERE policy = ? AND state = 'committed' ORDER BY version", (policy,)
        )
    ]
    if committed != backend.batches:
        problems.append(f"{policy}: the ledger committed batches {committed}, the weights hold {backend.batches}")
    ledger = {
        f"{group}/{index}/{agent}/{n}"
        for group, index, agent, n in db.execute(
            "SELECT group_id, idx, agent, n FROM samples WHERE policy = ? AND state = 'trained'", (policy,)
        )
    }
    weights = {sample_id for sample_id, use in backend.trained if use == 0}
    if ledger != weights:
        only_ledger, only_weights = sorted(ledger - weights)[:3], sorted(weights - ledger)[:3]
        problems.append(f"{policy}: trained for the ledger only {only_ledger}, for the weights only {only_weights}")
    return problems + _replayed_once(db, policy, backend)


def _replayed_once(db: sqlite3.Connection, policy: str, backend: FakeBackend) -> list[str]:
    """Of every group that came again, in which use: the batches in the weights are those of the ledger."""
    ledger = set(
        db.execute(
            "SELECT g.group_id, g.use FROM batch_groups g JOIN batches b ON b.id = g.batch "
            "WHERE b.policy = ? AND b.state = 'committed' AND g.use > 0",
            (policy,),
        ).fetchall()
    )
    weights = {(int(sample_id.split("/")[0]), use) for sample_id, use in backend.trained if use > 0}
    if ledger == weights:
        return []
    return [f"{policy}: replayed for the ledger {sorted(ledger)}, for the weights {sorted(weights)}"]
