"""Steps as they are read from a run's history: whole, or only what is new, with the same numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from astraflow.dataflow.store import Store, connect
from astraflow.run.run_db import RunDb, Step


@pytest.fixture
def store() -> Iterator[Store]:
    connection = connect(":memory:")
    yield Store(connection)
    connection.close()


def history(store: Store, *, steps: int, seed: int = 0) -> None:
    """Two policies at 1 : 3, two groups of two before each step, some of them failed, supervised or evaluation."""
    rng = random.Random(seed)
    at, version = 0.0, {"a": 0, "b": 0}
    with store.transaction():
        for number in range(1, 2 * steps + 1):
            at += 1.0
            group(store, number, at, rng)
            if number % 2 == 0:
                policy = "b" if number % 8 else "a"
                commit(store, policy, version[policy], at + 0.5)
                version[policy] += 1


def group(store: Store, number: int, at: float, rng: random.Random) -> None:
    supervised, lane = int(rng.random() < 0.1), int(rng.random() < 0.1)
    store.run(
        "INSERT INTO groups (id, purpose, state, size, left_episodes, supervised, task, task_key, opened_at, ended_at) "
        "VALUES (?, 'train', 'closed', 2, 0, ?, x'', 'k', 0, ?)",
        (number, supervised, at),
    )
    for index in range(2):
        state = "done" if rng.random() < 0.8 else "given_up"
        store.run(
            "INSERT INTO episodes (group_id, idx, state, lane, supervised, ended_at, score) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (number, index, state, lane, supervised, at - 0.25 * index, None if rng.random() < 0.1 else 1.0),
        )
    for policy in ("a", "b"):
        reward = None if rng.random() < 0.2 else rng.random()
        store.run(
            "INSERT INTO group_policy (group_id, policy, state, reward) VALUES (?, ?, 'dropped', ?)",
            (number, policy, reward),
        )


def commit(store: Store, policy: str, version: int, at: float) -> None:
    store.run(
        "INSERT INTO batches (policy, state, version, tokens, sequences, cut_at, ended_at, metrics) "
        "VALUES (?, 'committed', ?, 1, 1, 0, ?, '{\"loss/total\": 0.5}')",
        (policy, version, at),
    )


def plainly(store: Store) -> list[Step]:
    """Step by step, each with its own look at everything."""
    found, before = [], {"a": -1.0, "b": -1.0}
    for policy, version, batch, at in store.all(
        "SELECT policy, version, id, ended_at FROM batches WHERE state = 'committed' ORDER BY ended_at"
    ):
        episodes = store.number(
            "SELECT COUNT(score) FROM episodes WHERE lane = 0 AND state = 'done' AND supervised = 0 "
            "AND ended_at > ? AND ended_at <= ?",
            before[policy],
            at,
        )
        rewards = [
            reward
            for (reward,) in store.all(
                "SELECT p.reward FROM group_policy p JOIN groups g ON g.id = p.group_id WHERE p.policy = ? "
                "AND g.supervised = 0 AND p.reward IS NOT NULL AND g.ended_at > ? AND g.ended_at <= ? "
                "ORDER BY g.ended_at",
                policy,
                before[policy],
                at,
            )
        ]
        before[policy] = at
        reward = sum(rewards) / len(rewards) if rewards else None
        metrics = {"loss/total": 0.5}
        found.append(
            Step(
                policy=policy,
                step=version + 1,
                batch=batch,
                at_s=at,
                metrics=metrics,
                reward=reward,
                episodes=episodes,
            )
        )
    return found


@pytest.mark.parametrize("seed", range(5))
def test_new_steps_are_those_of_the_whole_history(store: Store, seed: int) -> None:
    history(store, steps=40, seed=seed)
    db = RunDb(store.connection)
    whole = db.steps()
    assert whole == plainly(store) and len(whole) == 40
    for number, step in enumerate(whole):
        assert db.steps(step.at_s) == whole[number:]
    assert db.steps(whole[-1].at_s + 1.0) == []


def test_an_undone_step_is_not_history(store: Store) -> None:
    history(store, steps=8)
    store.run("UPDATE batches SET state = 'cut', ended_at = NULL WHERE id >= 7")
    db = RunDb(store.connection)
    assert [step.batch for step in db.steps()] == [1, 2, 3, 4, 5, 6]
    assert db.steps() == plainly(store)


def test_a_look_reads_no_history_twice(store: Store) -> None:
    def cost(from_s: float) -> int:
        nonlocal ticks
        ticks = 0
        RunDb(store.connection).steps(from_s)
        return ticks

    def tick() -> int:
        nonlocal ticks
        ticks += 1
        return 0

    ticks = 0
    history(store, steps=1_000)
    last = RunDb(store.connection).steps()[-1].at_s
    store.connection.set_progress_handler(tick, 1000)
    assert cost(last + 1.0) < 15, "what was seen is read again"
    assert cost(0.0) < 400, "every step looks at the whole history"
    store.connection.set_progress_handler(None, 0)
