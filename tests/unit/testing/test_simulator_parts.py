"""The simulator's own parts: what they promise must hold, else its verdicts mean nothing."""

from __future__ import annotations

import asyncio
import sqlite3
from importlib import resources
from pathlib import Path

import pytest

from astraflow.errors import Unavailable
from astraflow.testing.simulator.checks import check_ledger
from astraflow.testing.simulator.database import Database
from astraflow.testing.simulator.edges import taken, watch
from astraflow.testing.simulator.history import History
from astraflow.testing.simulator.plan import ACTIONS, Plan
from astraflow.testing.simulator.process import Killed, Life, Process
from astraflow.testing.virtual_loop import run_virtual


def test_a_crash_in_a_transaction_rolls_it_back_and_the_rest_survives(tmp_path: Path) -> None:
    database = Database(tmp_path / "run.db")
    first = database.connect()
    first.execute("CREATE TABLE t (x)")
    first.execute("BEGIN")
    first.execute("INSERT INTO t VALUES (1)")
    first.execute("COMMIT")
    told: list[str] = []
    database.light_fuse(1, lambda: told.append("boom"))
    first.execute("BEGIN")
    first.execute("INSERT INTO t VALUES (2)")
    with pytest.raises(Killed):
        first.execute("INSERT INTO t VALUES (3)")
    database.kill()
    assert told == ["boom"]
    with pytest.raises(Killed):
        first.execute("SELECT 1")
    first.close()
    second = database.connect()
    assert second.execute("SELECT x FROM t").fetchall() == [(1,)]
    database.close()


def test_the_keeper_sees_what_is_on_disk_and_a_process_that_dies_before_takes_it_along(tmp_path: Path) -> None:
    database = Database(tmp_path / "run.db")
    first = database.connect()
    first.execute("CREATE TABLE t (x)")
    assert not database.is_writing
    first.execute("BEGIN IMMEDIATE")
    first.execute("INSERT INTO t VALUES (1)")
    assert database.is_writing
    assert database.keeper.execute("SELECT COUNT(*) FROM t").fetchone() == (0,)
    database.kill()
    assert not database.is_writing
    with pytest.raises(Killed):
        first.execute("COMMIT")
    assert database.connect().execute("SELECT COUNT(*) FROM t").fetchone() == (0,)
    database.close()


def test_a_process_that_dies_when_it_has_written_leaves_what_it_wrote(tmp_path: Path) -> None:
    database = Database(tmp_path / "run.db")
    first = database.connect()
    first.execute("CREATE TABLE t (x)")
    told: list[str] = []
    database.die_when_written(lambda: told.append("boom"))
    first.execute("BEGIN")
    first.execute("INSERT INTO t VALUES (1)")
    assert told == []
    with pytest.raises(Killed):
        first.execute("COMMIT")
    assert told == ["boom"] and database.keeper.execute("SELECT x FROM t").fetchall() == [(1,)]
    first.execute("BEGIN")
    first.execute("COMMIT")  # once
    database.close()


def test_a_fuse_burns_only_inside_transactions(tmp_path: Path) -> None:
    database = Database(tmp_path / "run.db")
    connection = database.connect()
    connection.execute("CREATE TABLE t (x)")
    database.light_fuse(0, lambda: None)
    connection.execute("SELECT * FROM t")
    connection.execute("BEGIN")
    with pytest.raises(Killed):
        connection.execute("COMMIT")
    database.close()


def test_edges_are_seen_and_rolled_back_ones_are_not() -> None:
    db = _ledger()
    watch(db)
    db.execute("INSERT INTO episodes (group_id, idx, state, lane, supervised) VALUES (1, 0, 'pending', 0, 0)")
    db.execute("UPDATE episodes SET state = 'leased'")
    db.execute("UPDATE episodes SET attempt = 2")
    db.execute("BEGIN")
    db.execute("UPDATE episodes SET state = 'done'")
    db.execute("ROLLBACK")
    assert taken(db) == {("episodes", "", "pending"): 1, ("episodes", "pending", "leased"): 1}
    db.close()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("DELETE FROM episodes WHERE idx = 1", "has 1 episodes, its size is 2"),
        ("UPDATE groups SET left_episodes = 1", "says 1 episodes are left, 0 are"),
        ("UPDATE groups SET state = 'open'", "is open with 0 episodes not ended"),
        ("DELETE FROM group_policy", "1 groups admitted, 0 are in some state"),
        ("UPDATE group_policy SET state = 'dropped'", "no reason, no batch, or never settled"),
        ("UPDATE samples SET state = 'held'", "a sample of it is held"),
        ("UPDATE batches SET version = 4", "its committed batches start from"),
        ("UPDATE batches SET state = 'cut'", "in a batch that is cut"),
        ("UPDATE policies SET serial = 9", "is at serial 9"),
        ("UPDATE policies SET version = 0", "its newest publication is of 1"),
        ("UPDATE evals SET state = 'open'", "evals: done -> open is no edge"),
    ],
)
def test_damage_to_a_ledger_is_found(damage: str, words: str) -> None:
    db = _ledger()
    watch(db)
    _one_step(db)
    assert check_ledger(db) == []
    db.execute(damage)
    found = check_ledger(db)
    db.close()
    assert any(words in problem for problem in found), found


def _ledger() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.executescript(resources.files("astraflow.dataflow").joinpath("schema.sql").read_text())
    return db


def _one_step(db: sqlite3.Connection) -> None:
    """One group of two episodes that was trained in the only batch, and a finished evaluation."""
    db.executescript(
        """
        INSERT INTO policies (name, trainable, version, serial) VALUES ('p', 1, 1, 2);
        INSERT INTO publications VALUES ('p', 1, 0, 'd0', x'', 0), ('p', 2, 1, 'd1', x'', 0);
        INSERT INTO groups (id, purpose, state, size, left_episodes, supervised, task, task_key, opened_at)
            VALUES (1, 'train', 'open', 2, 0, 0, x'', 'k', 0);
        UPDATE groups SET state = 'ready';
        UPDATE groups SET state = 'closed';
        INSERT INTO episodes (group_id, idx, state, lane, supervised)
            VALUES (1, 0, 'pending', 0, 0), (1, 1, 'pending', 0, 0);
        UPDATE episodes SET state = 'leased';
        UPDATE episodes SET state = 'done';
        INSERT INTO batches (id, policy, state, version, tokens, sequences, cut_at)
            VALUES (1, 'p', 'cut', 0, 4, 2, 0);
        INSERT INTO batch_groups VALUES (1, 0, 1, 0);
        UPDATE batches SET state = 'issued';
        UPDATE batches SET state = 'committed';
        INSERT INTO group_policy (group_id, policy, state, batch, version) VALUES (1, 'p', 'open', 1, 1);
        UPDATE group_policy SET state = 'ready';
        UPDATE group_policy SET state = 'kept';
        UPDATE group_policy SET state = 'batched';
        UPDATE group_policy SET state = 'trained';
        INSERT INTO samples (group_id, policy, idx, agent, n, state, tokens)
            VALUES (1, 'p', 0, 'a', 0, 'held', 2), (1, 'p', 1, 'a', 0, 'held', 2);
        UPDATE samples SET state = 'trained';
        INSERT INTO evals (policy, version, digest, dataset, state, episodes, left_groups, opened_at)
            VALUES ('p', 0, 'd0', 't', 'open', 1, 0, 0);
        UPDATE evals SET state = 'done';
        """
    )


def test_a_process_is_killed_at_an_await_and_started_again() -> None:
    async def main() -> None:
        history = History()
        lives: list[int] = []

        async def start(life: Life) -> None:
            lives.append(life.number)
            if life.number < 3:
                await asyncio.sleep(100)

        process = Process("p", start, history=history, restart_s=lambda: 1.0)
        running = asyncio.create_task(process.run())
        await asyncio.sleep(10)
        assert process.crash()
        assert not process.crash()
        await asyncio.sleep(10)
        assert process.crash(5.0)
        await running
        assert lives == [1, 2, 3]
        assert process.finished

    run_virtual(main, seed=0)


def test_what_a_dead_process_still_does_is_nothing() -> None:
    async def main() -> list[str]:
        did: list[str] = []

        async def start(life: Life) -> None:
            try:
                await asyncio.sleep(100)
            finally:
                life.check()
                did.append("cleaned up after its death")

        process = Process("p", start, history=History(), restart_s=lambda: 1.0)
        process.stays_down = True
        running = asyncio.create_task(process.run())
        await asyncio.sleep(1)
        process.crash()
        await running
        return did

    assert run_virtual(main) == []


def test_an_error_restarts_and_is_counted_and_a_bug_fails_the_run() -> None:
    async def main() -> None:
        history = History()

        async def start(life: Life) -> None:
            if life.number == 1:
                raise Unavailable("dataflow is down")
            if life.number == 2:
                raise KeyError("a bug")

        process = Process("worker7", start, history=history, restart_s=lambda: 1.0)
        with pytest.raises(KeyError):
            await process.run()
        assert history.faults["died/worker/Unavailable"] == 1

    run_virtual(main)


def test_plans_depend_on_the_seed_alone_and_cover_every_act() -> None:
    assert [Plan.draw(s) for s in range(50)] == [Plan.draw(s) for s in range(50)]
    acts = {act.what for s in range(200) for act in Plan.draw(s).acts}
    assert acts == set(ACTIONS)
    assert any(not Plan.draw(s).acts for s in range(50)), "some runs must be left in peace"
