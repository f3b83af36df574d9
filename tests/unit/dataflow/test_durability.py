"""Power loss and torn writes on real files: what was acknowledged is there, and the ledger balances."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from astraflow.dataflow.conservation import balance
from astraflow.dataflow.service import DataflowService
from astraflow.testing.virtual_clock import ManualClock
from tests.unit.dataflow.rig import Rig, make_spec

FILES = ("run.db", "run.db-wal")


def photograph(folder: Path, target: Path) -> None:
    """The bytes that a power loss at this moment would leave: synced before anybody was answered."""
    target.mkdir()
    for name in FILES:
        shutil.copyfile(folder / name, target / name)


def play(rig: Rig, epoch: int, album: Path) -> list[tuple[Path, int, set[tuple[int, int]]]]:
    """Two steps, photographed after every acknowledgement: (files, version, episodes acknowledged)."""
    shots: list[tuple[Path, int, set[tuple[int, int]]]] = []
    done: set[tuple[int, int]] = set()

    def shoot() -> None:
        target = album / f"{len(shots)}"
        photograph(rig.folder or album, target)
        shots.append((target, rig.digest("p")[0], set(done)))

    for _ in range(2):
        for lease in rig.leases(4):
            rig.submit(lease, float(lease.index))
            done.add((lease.group, lease.index))
            shoot()
        rig.commit(rig.take(epoch))
        shoot()
    return shots


def look(folder: Path) -> tuple[int, set[tuple[int, int]]]:
    """Open what is left, as SQLite recovers it: (version, episodes stored); it must balance."""
    db = sqlite3.connect(folder / "run.db", isolation_level=None)
    try:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert balance(db)["difference"] == 0
        version = db.execute("SELECT version FROM policies").fetchone()
        return version[0], set(db.execute("SELECT group_id, idx FROM episodes WHERE state = 'done'"))
    finally:
        db.close()


def test_guarantee_what_was_acknowledged_survives_power_loss(tmp_path: Path) -> None:
    with Rig(make_spec(), folder=tmp_path / "run") as rig:
        shots = play(rig, rig.resume(), tmp_path)
    for folder, version, done in shots:
        assert look(folder) == (version, done)


@pytest.mark.parametrize("seed", range(4))
def test_a_torn_last_write_loses_nothing_that_was_acknowledged_before(tmp_path: Path, seed: int) -> None:
    """The log is cut at any byte: the state is that of some whole transaction, never of a half one."""
    with Rig(make_spec(), folder=tmp_path / "run") as rig:
        shots = play(rig, rig.resume(), tmp_path)
    last, version, done = shots[-1]
    sizes = [(folder / "run.db-wal").stat().st_size for folder, _, _ in shots]
    whole = (last / "run.db-wal").read_bytes()
    assert sizes[-1] == len(whole) and sizes == sorted(sizes), "no checkpoint in between: the log only grew"
    for step in range(12):
        cut = len(whole) * (step * 4 + seed + 1) // 49 + seed * 7
        torn = tmp_path / f"torn{step}"
        torn.mkdir()
        shutil.copyfile(last / "run.db", torn / "run.db")
        (torn / "run.db-wal").write_bytes(whole[:cut])
        before = [i for i, size in enumerate(sizes) if size <= cut]
        if not before and cut < sizes[0]:
            continue
        found_version, found = look(torn)
        at_least = shots[before[-1]]
        assert at_least[1] <= found_version <= version
        assert at_least[2] <= found <= done


def test_garbage_at_the_end_of_the_log_is_ignored(tmp_path: Path) -> None:
    with Rig(make_spec(), folder=tmp_path / "run") as rig:
        shots = play(rig, rig.resume(), tmp_path)
    folder, version, done = shots[-1]
    with (folder / "run.db-wal").open("ab") as handle:
        handle.write(b"\xff" * 10_000)
    assert look(folder) == (version, done)


def test_the_service_goes_on_from_a_torn_file_to_the_end(tmp_path: Path) -> None:
    with Rig(make_spec(), folder=tmp_path / "run") as rig:
        shots = play(rig, rig.resume(), tmp_path)
    folder = shots[6][0]
    wal = folder / "run.db-wal"
    wal.write_bytes(wal.read_bytes()[:-100])
    with Rig(make_spec(), folder=folder) as rig:
        rig.advance(11)
        epoch = rig.resume(incarnation="t2")
        while not rig.batch(epoch).finished:
            for lease in rig.lease(4).leases:
                rig.submit(lease, float(lease.index))
            reply = rig.batch(epoch)
            if reply.batch is not None:
                rig.commit(reply.batch)
            rig.advance(11)
        assert rig.service.ledger.state == "finished"
        rig.balanced()


def test_the_settings_that_durability_rests_on(tmp_path: Path) -> None:
    with Rig(folder=tmp_path) as rig:
        assert rig.db.one("PRAGMA journal_mode") == ("wal",)
        assert rig.db.one("PRAGMA synchronous") == (2,)


def test_a_restart_with_many_episodes_is_quick(tmp_path: Path) -> None:
    """Opening scans no table of episodes: 100,000 of them (here 20,000 rows) change nothing."""
    import time

    spec = make_spec()
    with Rig(spec, folder=tmp_path) as rig:
        rig.db.run("BEGIN")
        rig.db.run_many(
            "INSERT INTO groups (id, purpose, state, size, left_episodes, supervised, task, task_key, opened_at) "
            "VALUES (?, 'eval', 'closed', 8, 0, 0, x'80', 't', 0)",
            [(g,) for g in range(1000, 3500)],
        )
        rig.db.run_many(
            "INSERT INTO episodes (group_id, idx, state, lane, supervised) VALUES (?, ?, 'given_up', 1, 0)",
            [(g, i) for g in range(1000, 3500) for i in range(8)],
        )
        rig.db.run("COMMIT")
    began = time.perf_counter()
    service = DataflowService.open(spec, tmp_path, clock=ManualClock())
    took = time.perf_counter() - began
    service.ledger.store.connection.close()
    assert service._lock is not None
    service._lock.close()
    assert took < 1.0
