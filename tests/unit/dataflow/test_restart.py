"""A restart on a file of 100,000 stored episodes: it opens and serves at once, because nothing of it reads them all."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from astraflow.dataflow.conservation import balance
from astraflow.dataflow.store import connect
from astraflow.dataflow.verify import verify
from astraflow.types import Outcome, Task
from astraflow.wire.codec import encode
from tests.unit.dataflow.rig import Rig, make_spec, manifest, tasks

STEPS, PER_BATCH, SIZE, WINDOW = 1_563, 8, 8, 20
GROUPS = STEPS * PER_BATCH
EPISODES = GROUPS * SIZE
"""100,032"""
BIG = (
    "episodes",
    "groups",
    "group_policy",
    "payloads",
    "samples",
    "events",
    "batch_groups",
    "pruned_groups",
    "batches",
    "batch_rows",
)

OF_THE_LIVE: tuple[str, ...] = (
    "groups_ready",
    "groups_open",
    "group_policy_live",
    "group_policy_kept",
    "episodes_pending",
)
OF_THE_LIVE += ("episodes_leased", "batches_live", "payloads_file", "batches_stored", "batches_file")
OF_THE_LIVE += ("events_joined",)
"""Indices that hold only what has not ended, is not pruned, or comes once per process: none grows with the episodes."""


def spec() -> Any:
    return make_spec(
        steps=STEPS + 10, groups_per_batch=PER_BATCH, group_size=SIZE, max_staleness=1, source=tasks(2 * GROUPS)
    )


def history() -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    """The rows that a run of so many steps leaves, step after step, as the transitions write them."""
    task = encode(Task(key="tasks-0", dataset="tasks", payload={"question": "7 times 8? " * 20}))
    body = bytes(range(256)) * 32
    for step in range(STEPS):
        groups = range(step * PER_BATCH + 1, (step + 1) * PER_BATCH + 1)
        at, batch = float(step), step + 1
        made = manifest("p", step + 1)
        stored = step >= STEPS - WINDOW
        places = [(group, idx) for group in groups for idx in range(SIZE)]
        opened = {"purpose": "train", "size": SIZE, "task": "tasks-0"}
        log: list[tuple[Any, ...]] = [(at, "admitted", group, None, None, None, opened) for group in groups]
        for group, idx in places:
            log.append((at, "leased", group, idx, None, None, {"attempt": 1, "worker": "w"}))
        for group in groups:
            for idx in range(SIZE):
                done = {"attempt": 1, "worker": "w", "outcome": "completed", "score": 1.0, "samples": {"p": 1}}
                log.append((at, "done", group, idx, None, None, done))
            log.append((at, "ready", group, None, None, None, {"arrival": group}))
            log.append((at, "kept", group, None, "p", None, {"reward": 0.5}))
        cut = {"version": step, "groups": list(groups), "tokens": 100, "sequences": 64, "masked": {}, "replayed": []}
        log.append((at, "cut", None, None, "p", batch, cut))
        log.append((at, "issued", None, None, "p", batch, {"trainer_epoch": 1, "version": step}))
        log.append(
            (at, "published", None, None, "p", None, {"serial": step + 2, "version": step + 1, "digest": made.digest})
        )
        log.append((at, "committed", None, None, "p", batch, {"version": step + 1, "trainer_epoch": 1}))
        if not stored:
            log.append((at, "pruned", None, None, "p", batch, {}))
            log += [(at, "pruned", group, None, None, None, {"episodes": SIZE, "bytes": 65536}) for group in groups]
        yield (
            "INSERT INTO events (at, kind, group_id, idx, policy, batch, data) VALUES (?, ?, ?, ?, ?, ?, ?)",
            [(*row[:-1], json.dumps(row[-1])) for row in log],
        )
        yield (
            "INSERT INTO groups (id, purpose, state, size, left_episodes, supervised, task, task_key, arrival, "
            "opened_at, ended_at) VALUES (?, 'train', 'closed', ?, 0, 0, ?, 'tasks-0', ?, ?, ?)",
            [(group, SIZE, task, group, at, at) for group in groups],
        )
        yield (
            "INSERT INTO group_policy (group_id, policy, state, arrival, min_version, fresh_version, batch, version, "
            "reward, verdict) VALUES (?, 'p', 'trained', ?, ?, ?, ?, ?, 0.5, ?)",
            [(group, group, step, step, batch, step + 1, b"\0" * 32) for group in groups],
        )
        yield (
            "INSERT INTO episodes (group_id, idx, state, outcome, lane, supervised, attempt, submitted, worker, "
            "leased_at, expires_at, deadline_at, leased_versions, ended_at, score, samples) "
            "VALUES (?, ?, 'done', ?, 0, 0, 1, 1, 'w', ?, ?, ?, '{\"p\": 1}', ?, 1.0, 1)",
            [(*place, Outcome.COMPLETED, at, at + 10, at + 630, at) for place in places],
        )
        yield (
            "INSERT INTO samples VALUES (?, 'p', ?, 'role_p', 0, 'trained', NULL, 100, ?, 0)",
            [(*place, step) for place in places],
        )
        yield (
            "INSERT INTO batches VALUES (?, 'p', 'committed', NULL, ?, 1, 100, 64, 0, ?, 'base', NULL, ?, '{}', ?, ?)",
            [(batch, step, step + 2, 32 * len(body) if stored else None, at, at)],
        )
        if stored:
            yield "INSERT INTO batch_rows VALUES (?, ?)", [(batch, body * 32)]
        yield (
            "INSERT INTO batch_groups VALUES (?, ?, ?, 0)",
            [(batch, position, group) for position, group in enumerate(groups)],
        )
        stamped = msgspec.structs.replace(made, serial=step + 2, trainer_epoch=1)
        yield (
            "INSERT INTO publications VALUES ('p', ?, ?, ?, ?, ?)",
            [(step + 2, step + 1, made.digest, encode(stamped), at)],
        )
        if stored:
            yield (
                "INSERT INTO payloads (group_id, idx, bytes, body) VALUES (?, ?, ?, ?)",
                [(*place, len(body), body) for place in places],
            )
        else:
            yield "INSERT INTO pruned_groups VALUES (?, 8, 65536, ?)", [(group, at) for group in groups]


def build(folder: Path) -> None:
    with Rig(spec(), folder=folder) as rig:
        rig.resume()
    db = connect(folder / "run.db")
    db.execute("BEGIN")
    for sql, rows in history():
        db.executemany(sql, rows)
    db.execute("UPDATE policies SET version = ?, serial = ?", (STEPS, STEPS + 1))
    db.executemany(
        "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        [("arrivals", GROUPS), ("now", float(STEPS)), ("first_lease_at", 0.0), ("oldest_checkpoint/p", STEPS - 10)],
    )
    db.execute("INSERT INTO counters VALUES ('episodes_done', ?)", (EPISODES,))
    db.execute("COMMIT")
    db.close()


NEWEST_FIRST = "ORDER BY id DESC LIMIT 1"
"""By the table's own key, and over after those that are open and a batch of others."""


def scans(db: sqlite3.Connection, statements: list[str]) -> list[str]:
    """Statements whose plan reads a whole table that grows with the run."""
    found = []
    for sql in dict.fromkeys(statements):
        if not sql.lstrip().startswith(("SELECT", "UPDATE", "DELETE", "INSERT")):
            continue
        for *_, detail in db.execute(f"EXPLAIN QUERY PLAN {sql}"):
            words = detail.split()
            if words == ["SCAN", "groups"] and NEWEST_FIRST in sql:
                continue
            if words[0] == "SCAN" and words[1] in BIG and words[-1] not in OF_THE_LIVE:
                found.append(f"{detail}: {sql}")
    return found


@pytest.mark.slow
def test_guarantee_a_restart_with_100_000_episodes_serves_within_5_seconds(tmp_path: Path) -> None:
    build(tmp_path)
    db = sqlite3.connect(tmp_path / "run.db", isolation_level=None)
    assert db.execute("SELECT COUNT(*) FROM episodes WHERE state = 'done'").fetchone() == (EPISODES,)
    statements: list[str] = []
    began, busy = time.perf_counter(), time.process_time()
    with Rig(spec(), folder=tmp_path, publish=False) as rig:
        opened = time.perf_counter() - began
        leases = rig.lease(4).leases
        served, busy = time.perf_counter() - began, time.process_time() - busy
        assert len(leases) == 4 and leases[0].group == GROUPS + 1
        assert rig.db.number("SELECT COUNT(*) FROM events WHERE kind = 'pruned'") == 9 * (STEPS - WINDOW)
        began = time.process_time()
        rig.advance(1.0)
        ticked = time.process_time() - began
        rig.db.connection.set_trace_callback(statements.append)
        # The same calls again, on the same file, with every statement noted.
        rig.service.ledger.policies.reload()
        rig.service.ledger.episodes.new_terms(rig.service._commits.now)
        rig.service.ledger.components.new_terms(rig.service._commits.now)
        rig.go(rig.service.publish_initial(manifest("p")))
        rig.service._retention.forget()
        rig.advance(1.0)
        rig.lease(4)
        for lease in leases:
            rig.submit(lease, 1.0)
        epoch = rig.resume(incarnation="t2")
        assert rig.batch(epoch).batch is None
        rig.db.connection.set_trace_callback(None)
        assert rig.db.number("SELECT COUNT(*) FROM events WHERE kind = 'pruned'") > 9 * (STEPS - WINDOW), "a slice went"
    print(f"opened after {opened:.2f} s, first lease after {served:.2f} s ({busy:.2f} s of the processor), "
          f"first tick {1000 * ticked:.0f} ms")  # fmt: skip
    assert len(statements) > 50
    assert not scans(db, statements), "\n".join(scans(db, statements))
    assert busy < 1.0, "of the 5 s that a restart may take; the rest is what the machine does besides"
    began = time.perf_counter()
    found = verify(db)
    print(f"verified {found.events} events against {found.rows} rows in {time.perf_counter() - began:.1f} s")
    assert found.differences == ()
    assert balance(db)["difference"] == 0
    db.close()


def test_the_check_for_scans_sees_one(tmp_path: Path) -> None:
    with Rig(folder=tmp_path) as rig:
        connection = rig.db.connection
        assert scans(connection, ["SELECT COUNT(*) FROM episodes WHERE score > 1"]) != []
        assert scans(connection, ["UPDATE groups SET size = 1 WHERE task_key = 'x'"]) != []
        assert scans(connection, ["SELECT 1 FROM groups WHERE id = 1"]) == []
