"""Counts of states for which nobody reads rows: what reading them would say, whatever is written or rolled back."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.dataflow.counts import Counts
from astraflow.dataflow.store import Store, connect
from tests.unit.dataflow.rig import Rig

EPISODE = "INSERT INTO episodes (group_id, idx, state, lane, supervised) VALUES (?, 0, ?, 0, 0)"
GROUP = "INSERT INTO group_policy (group_id, policy, state, reason) VALUES (?, ?, ?, ?)"
SAMPLE = "INSERT INTO samples (group_id, policy, idx, agent, n, state, tokens, age) VALUES (?, ?, 0, 'a', 0, ?, 10, ?)"
KEYS = st.integers(0, 5)
POLICIES = st.sampled_from(("solver", "verifier"))
REASONS = st.sampled_from((None, "no_signal", "overlong"))
AGES = st.sampled_from((None, 0, 2, 10))
WRITES = st.one_of(
    st.tuples(st.just(EPISODE), KEYS, st.sampled_from(("pending", "leased", "done"))),
    st.tuples(
        st.just("UPDATE episodes SET state = ?2 WHERE group_id <= ?1"), KEYS, st.sampled_from(("leased", "done"))
    ),
    st.tuples(st.just("DELETE FROM episodes WHERE group_id = ?"), KEYS),
    st.tuples(st.just(GROUP), KEYS, POLICIES, st.sampled_from(("open", "dropped")), REASONS),
    st.tuples(st.just("UPDATE group_policy SET reason = ?2 WHERE group_id <= ?1"), KEYS, REASONS),
    st.tuples(st.just("UPDATE group_policy SET state = 'kept', reason = NULL WHERE policy = ?"), POLICIES),
    st.tuples(st.just("DELETE FROM group_policy WHERE group_id = ?"), KEYS),
    st.tuples(st.just(SAMPLE), KEYS, POLICIES, st.sampled_from(("held", "trained")), AGES),
    st.tuples(st.just("UPDATE samples SET state = 'trained', age = ?2 WHERE group_id <= ?1"), KEYS, AGES),
    st.tuples(st.just("UPDATE samples SET state = 'held' WHERE policy = ?"), POLICIES),
    st.tuples(st.just("DELETE FROM samples WHERE group_id = ?"), KEYS),
)


def read(store: Store) -> tuple[Any, ...]:
    """The same by reading every row."""
    groups: dict[str, dict[str, int]] = {"solver": {}, "verifier": {}}
    ages: dict[str, dict[str, int]] = {"solver": {}, "verifier": {}}
    for policy, state, reason in store.all("SELECT policy, state, reason FROM group_policy"):
        name = state if reason is None else f"{state}/{reason}"
        groups[policy][name] = groups[policy].get(name, 0) + 1
    for policy, age in store.all(
        "SELECT policy, age FROM samples WHERE state = 'trained' AND age IS NOT NULL ORDER BY age"
    ):
        ages[policy][str(age)] = ages[policy].get(str(age), 0) + 1
    episodes = dict(store.all("SELECT state, COUNT(*) FROM episodes GROUP BY state"))
    return episodes, groups, [list(found.items()) for found in ages.values()]


def told(counts: Counts) -> tuple[Any, ...]:
    policies = ("solver", "verifier")
    return (
        counts.episodes(),
        {policy: counts.groups(policy) for policy in policies},
        [list(counts.ages(policy).items()) for policy in policies],
    )


@settings(max_examples=150, deadline=None)
@given(
    before=st.lists(WRITES, max_size=8),
    spans=st.lists(st.tuples(st.lists(WRITES, max_size=6), st.booleans(), st.booleans()), max_size=5),
)
def test_counts_are_what_reading_would_say(before: list[Any], spans: list[Any]) -> None:
    connection = connect(":memory:")
    store = Store(connection)
    for write in before:
        _do(store, write)
    counts = Counts(store)
    assert told(counts) == read(store)
    for writes, transition_fails, transaction_fails in spans:
        try:
            with store.transaction():
                for write in writes[:3]:
                    _do(store, write)
                _savepoint(store, writes[3:], fails=transition_fails)
                if transaction_fails:
                    raise RuntimeError
        except RuntimeError:
            pass
        assert told(counts) == read(store)
    assert told(Counts(store)) == read(store)  # told anew
    connection.close()


def _do(store: Store, write: tuple[Any, ...]) -> None:
    with contextlib.suppress(sqlite3.IntegrityError):  # the row is there: nothing is written
        store.run(write[0], write[1:])


def _savepoint(store: Store, writes: list[Any], *, fails: bool) -> None:
    try:
        with store.savepoint():
            for write in writes:
                _do(store, write)
            if fails:
                raise ValueError
    except ValueError:
        pass


def test_they_leave_nothing_in_the_file(tmp_path: Any) -> None:
    path = tmp_path / "run.db"
    store = Store(connect(path))
    before = store.all("SELECT name FROM sqlite_master ORDER BY name")
    Counts(store)
    assert store.all("SELECT name FROM sqlite_master ORDER BY name") == before
    store.run(EPISODE, (1, "pending"))
    store.connection.close()
    with sqlite3.connect(path) as other:  # a program of before, or a person
        other.execute("UPDATE episodes SET state = 'done'")
    again = Store(connect(path))
    assert Counts(again).episodes() == {"done": 1}
    again.connection.close()


@pytest.mark.parametrize("episodes", [200, 2_000])
def test_a_status_reads_no_table_of_the_run(episodes: int) -> None:
    """The machine's steps of a status do not grow with the run's length."""
    rig = Rig()
    store = rig.service.ledger.store
    with store.transaction():
        for group in range(10_000, 10_000 + episodes):
            store.run(EPISODE, (group, "done"))
            store.run(GROUP, (group, "p", "trained", None))
            store.run(SAMPLE, (group, "p", "trained", 1))
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 100
        return 0

    store.connection.set_progress_handler(count, 100)
    found = rig.go(rig.service.status())
    store.connection.set_progress_handler(None, 0)
    assert found.episodes["done"] >= episodes
    assert steps < 3_000, "a table is read for a status"
    rig.close()
