"""Events and counters are collected within a transaction and written at its end: in order, or not at all."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from astraflow.algorithms.keep import DropZeroVariance
from astraflow.dataflow.store import Store, connect
from astraflow.errors import Fenced, RunFailed
from astraflow.wire import messages as m
from tests.unit.dataflow.rig import Rig, make_spec, manifest


@pytest.fixture
def store() -> Iterator[Store]:
    connection = connect(":memory:")
    yield Store(connection)
    connection.close()


def kinds(store: Store) -> list[str]:
    return [kind for (kind,) in store.all("SELECT kind FROM events ORDER BY id")]


def test_one_statement_at_the_end_writes_all_of_a_transaction(store: Store) -> None:
    written: list[str] = []
    many = store.run_many
    store.run_many = lambda sql, rows: written.append(sql) or many(sql, rows)  # type: ignore[assignment,func-returns-value]
    with store.transaction():
        for n in range(50):
            store.event(1.0, "leased", group=n)
            store.count("leases")
        assert kinds(store) == [] and store.counter("leases") == 50
    assert [sql.split()[2] for sql in written] == ["events", "counters"]
    assert store.all("SELECT id, group_id FROM events") == [(n + 1, n) for n in range(50)]
    assert store.all("SELECT * FROM counters") == [("leases", 50.0)]


def test_several_events_of_one_kind_keep_their_place(store: Store) -> None:
    with store.transaction():
        store.event(1.0, "admitted", group=1)
        store.events(1.0, "leased", [(1, 0, {"attempt": 1}), (1, 1, {"attempt": 1})])
        store.event(1.0, "handed_back", group=1, idx=0)
    assert kinds(store) == ["admitted", "leased", "leased", "handed_back"]


def test_a_transition_that_raises_takes_its_own_along_and_no_other_s(store: Store) -> None:
    with store.transaction():
        with store.savepoint():
            store.event(1.0, "kept", group=1)
            store.count("kept")
        with pytest.raises(Fenced), store.savepoint():
            store.event(1.0, "dropped", group=1)
            store.count("kept", 10)
            raise Fenced("older attempt")
        store.event(1.0, "stale", group=2)
    assert kinds(store) == ["kept", "stale"]
    assert store.counter("kept") == 1


def test_nothing_of_a_transaction_that_raises(store: Store) -> None:
    with pytest.raises(RuntimeError), store.transaction():
        store.event(1.0, "kept", group=1)
        store.count("kept")
        raise RuntimeError
    with store.transaction():
        store.event(2.0, "stale", group=2)
    assert kinds(store) == ["stale"] and store.counter("kept") == 0


def test_nor_of_one_that_the_disk_did_not_take(store: Store) -> None:
    run = store.run

    def refuse(sql: str, *values: Any) -> Any:
        if sql == "COMMIT":
            raise sqlite3.OperationalError("disk I/O error")
        return run(sql, *values)

    store.run = refuse  # type: ignore[assignment]
    with pytest.raises(sqlite3.OperationalError), store.transaction():
        store.event(1.0, "kept", group=1)
    store.run = run
    with store.transaction():
        store.event(2.0, "stale", group=2)
    assert kinds(store) == ["stale"]


def test_without_a_transaction_it_is_written_at_once(store: Store) -> None:
    store.event(1.0, "kept", group=1, reward=0.5)
    store.count("kept")
    assert store.one("SELECT kind, data FROM events") == ("kept", '{"reward":0.5}')
    assert store.counter("kept") == 1


def test_what_is_not_finite_is_null_in_the_log(store: Store) -> None:
    """JSON has no word for it, and SQLite's functions refuse a row that holds one."""
    store.event(1.0, "committed", policy="p", metrics={"loss": float("nan"), "kl": float("inf"), "lr": 0.1})
    row = store.one("SELECT data, json_extract(data, '$.metrics.lr') FROM events")
    assert row is not None and row[1] == 0.1
    assert json.loads(row[0])["metrics"] == {"loss": None, "kl": None, "lr": 0.1}


def test_a_replaced_trainer_is_known_within_the_transaction_that_replaced_it() -> None:
    """Both resumes come together with a late copy of the first: it must not fence the second."""

    def request(name: str) -> m.ResumeRequest:
        first = manifest("p")
        return m.ResumeRequest(policy="p", version=0, digest=first.digest, trainer=name, incarnation=f"i-{name}")

    with Rig() as rig:

        async def together() -> list[Any]:
            calls = [rig.flow.resume(request(name)) for name in ("a", "b", "a")]
            return await asyncio.gather(*calls, return_exceptions=True)

        first, second, late = rig.go(together())
        assert (first.trainer_epoch, second.trainer_epoch) == (1, 2)
        assert isinstance(late, Fenced) and "had trainer epoch 1 of p" in str(late)


class Raises(DropZeroVariance):
    def verdict(self, group: Any, advantages: Any) -> str | None:
        raise ValueError("a bug of the user")


def test_the_last_episode_is_stored_although_the_verdict_raises(tmp_path: Path) -> None:
    """Verdict and last episode share a transaction, and not a savepoint."""
    with Rig(make_spec(keep=[Raises()])) as rig:
        a, b = rig.leases(2)
        rig.submit(a, 0.0)
        rig.submit(b, 1.0)
        store = rig.service.ledger.store
        assert store.all("SELECT state FROM episodes") == [("done",), ("done",)]
        assert rig.group(1) == ("ready", None)
        assert "a bug of the user" in str(store.get("error"))
        with pytest.raises(RunFailed):
            rig.batch(rig.resume())
