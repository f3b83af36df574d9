"""Held-out accuracy of each role, from the episodes of evaluations as they are stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from astraflow.dataflow.store import Store, connect
from astraflow.run.finish import accuracy_lines, role_lines
from astraflow.run.held_out_roles import held_out_by_role, rewards_by_role
from astraflow.run.run_db import RunDb
from astraflow.types import Episode, Outcome, Sample, Span, Trajectory, Turn
from astraflow.wire.codec import encode


def trajectory(role: str, agent: str, *rewards: float | None) -> Trajectory:
    count = len(rewards)
    sample = Sample(
        tokens=np.arange(1 + count, dtype=np.int32),
        sampled=np.arange(1 + count) > 0,
        logprobs=np.where(np.arange(1 + count) > 0, -1.0, 0.0).astype(np.float32),
        spans=(Span(start=1, stop=1 + count, version=0, digest="d0"),),
    )
    turns = tuple(Turn(index=n, sample=0, start=n + 1, stop=n + 2, reward=reward) for n, reward in enumerate(rewards))
    return Trajectory(agent=agent, role=role, policy="main", samples=(sample,), turns=turns)


def episode(*trajectories: Trajectory) -> Episode:
    return Episode(task_key="k", outcome=Outcome.COMPLETED, trajectories=trajectories)


def both(solver: float | None, verifier: float | None) -> Episode:
    return episode(trajectory("solver", "solver", solver), trajectory("verifier", "verifier", verifier))


class Evaluated:
    """A run's database with evaluations of version 0, each episode a group of its own; None is a lost one."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(connect(folder / "run.db"))
        self.db = RunDb(self.store.connection)
        self.payloads = folder / "payloads"
        self._groups = 0

    def add(self, *episodes: Episode | None, digest: str = "d0", pruned: bool = False) -> None:
        self.store.run(
            "INSERT INTO evals (policy, version, digest, dataset, state, episodes, left_groups, score, coverage, "
            "opened_at, ended_at) VALUES ('main', 0, ?, 'x', 'done', ?, 0, 0.5, 1.0, 0, 1)",
            (digest, len(episodes)),
        )
        for each in episodes:
            self._groups += 1
            self.store.run(
                "INSERT INTO groups (id, purpose, state, size, left_episodes, supervised, task, task_key, eval_id, "
                "opened_at) VALUES (?, 'eval', 'closed', 1, 0, 0, x'', 'k', (SELECT MAX(id) FROM evals), 0)",
                (self._groups,),
            )
            self.store.run(
                "INSERT INTO episodes (group_id, idx, state, lane, supervised) VALUES (?, 0, ?, 1, 0)",
                (self._groups, "given_up" if each is None else "done"),
            )
            if each is not None and not pruned:
                body = encode(each)
                self.store.run(
                    "INSERT INTO payloads (group_id, idx, bytes, body) VALUES (?, 0, ?, ?)",
                    (self._groups, len(body), body),
                )

    def by_role(self) -> dict[str, object]:
        return dict(held_out_by_role(self.db, self.payloads))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Evaluated]:
    made = Evaluated(tmp_path)
    yield made
    made.store.connection.close()


def test_each_role_has_its_own_accuracy(run: Evaluated) -> None:
    run.add(both(1.0, 1.0), both(0.0, 1.0), both(0.0, 0.0), both(0.0, 1.0))
    assert run.by_role() == {"solver": [(0.0, 0.25)], "verifier": [(0.0, 0.75)]}


def test_a_lost_episode_is_wrong_for_every_role(run: Evaluated) -> None:
    run.add(both(1.0, 1.0), both(1.0, 0.0), None, None)
    assert run.by_role() == {"solver": [(0.0, 0.5)], "verifier": [(0.0, 0.25)]}


def test_who_was_not_rewarded_does_not_count(run: Evaluated) -> None:
    run.add(both(1.0, None), both(0.0, 1.0), both(0.0, 0.0))
    assert run.by_role() == {"solver": [(0.0, pytest.approx(1 / 3))], "verifier": [(0.0, 0.5)]}


def test_an_evaluation_whose_text_is_gone_has_no_point(run: Evaluated) -> None:
    run.add(both(1.0, 1.0), both(1.0, 0.0))
    run.add(both(0.0, 0.0), both(0.0, 0.0), digest="d1", pruned=True)
    assert run.by_role() == {"solver": [(0.0, 1.0)], "verifier": [(0.0, 0.5)]}


def test_one_role_has_nothing_to_add_to_the_score(run: Evaluated) -> None:
    run.add(episode(trajectory("solver", "solver", 1.0)))
    assert run.by_role() == {}


def test_turns_and_agents_of_a_role_are_averaged_in_their_episode() -> None:
    found = rewards_by_role(
        episode(
            trajectory("solver", "solver", 1.0, 0.0, None),
            trajectory("solver", "solver#2", 0.5),
            trajectory("judge", "judge", None),
        )
    )
    assert found == {"solver": 0.5}


def test_a_role_that_earns_the_episodes_reward_has_its_line_already() -> None:
    score, verifier = [(0.0, 0.25), (3.0, 0.5), (6.0, 0.75)], [(0.0, 0.5), (6.0, 0.875)]
    lines = role_lines(score, {"solver": [score[0], score[2]], "verifier": verifier})
    assert lines == {"held-out verifier": verifier}
    assert accuracy_lines({"reward solver": [(1.0, 0.1)], "held-out accuracy": score, **lines}) == [
        "held-out accuracy  0.250 → 0.750",
        "held-out verifier  0.500 → 0.875",
    ]
