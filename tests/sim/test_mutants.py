"""Seeded bugs in the real components: the simulator must find each of them, else its silence means nothing."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from astraflow.dataflow import cut as cut_module
from astraflow.dataflow import sweeps as sweeps_module
from astraflow.dataflow import trainers as trainers_module
from astraflow.dataflow.batches import Batches
from astraflow.dataflow.commits import Commits
from astraflow.dataflow.episodes import Episodes
from astraflow.dataflow.groups import Groups
from astraflow.dataflow.ledger import Ledger
from astraflow.dataflow.policies import Policies
from astraflow.dataflow.store import Store
from astraflow.testing.faulty import Faults
from astraflow.testing.simulator import simulate
from astraflow.testing.simulator.plan import SECOND, Act, Plan, in_order
from astraflow.trainer.checkpoints import Checkpoints
from astraflow.types import Batch

MOST_SEEDS = 80
Mutation = Callable[[pytest.MonkeyPatch], None]


def _no_undo(patch: pytest.MonkeyPatch) -> None:
    """A trainer resumes further back and nothing is un-committed."""
    patch.setattr(Batches, "undo", lambda *_: ())


def _no_staleness_sweep(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cut_module, "is_stale", lambda *_, **__: False)
    patch.setattr(Groups, "sweep", lambda *_: 0)
    patch.setattr(Groups, "_is_stale", lambda *_: False)


def _rows_move(patch: pytest.MonkeyPatch) -> None:
    """A batch that is issued again has its rows in another order."""
    issue = Batches.issue

    def reversed_again(self: Batches, now: float, batch: int, epoch: int) -> Batch:
        import msgspec

        given = issue(self, now, batch, epoch)
        return msgspec.structs.replace(given, rows=given.rows[::-1]) if epoch % 2 == 0 else given

    patch.setattr(Batches, "issue", reversed_again)


def _leases_never_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Episodes, "expired", lambda *_: [])


def _refused_calls_leave_traces(patch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def savepoint(self: Store) -> Iterator[None]:
        yield

    submit = Episodes.submit

    def half(self: Episodes, now: float, worker: str, group: int, idx: int, attempt: int, episode: Any) -> Any:
        done = submit(self, now, worker, group, idx, attempt, episode)
        if done.duplicate:
            self._store.run("UPDATE groups SET left_episodes = left_episodes - 1 WHERE id = ?", (group,))
        return done

    patch.setattr(Store, "savepoint", savepoint)
    patch.setattr(Episodes, "submit", half)


def _algorithms_forget(patch: pytest.MonkeyPatch) -> None:
    """A restart begins with the first task again."""
    patch.setattr(Ledger, "load_algorithms", lambda *_: None)


def _trainers_are_not_fenced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Policies, "require_epoch", lambda *_: None)
    patch.setattr(Batches, "_require_issued", lambda *_: None)
    patch.setattr(Checkpoints, "_require_own", lambda *_: None)


def _serials_repeat(patch: pytest.MonkeyPatch) -> None:
    """A resume that goes back is not announced: workers go on with weights of an undone history."""
    patch.setattr(trainers_module, "_publish_resumed", lambda *_: None)


def _samples_forgotten_at_undo(patch: pytest.MonkeyPatch) -> None:
    to_groups = Batches._to_groups

    def only_forward(self: Batches, batch: int, policy: str, state: str, **more: Any) -> None:
        if state != "batched":
            to_groups(self, batch, policy, state, **more)

    patch.setattr(Batches, "_to_groups", only_forward)


def _checkpoints_lie(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint holds what was trained, under the name of the step before."""
    write = Checkpoints.write

    def late(self: Checkpoints, version: int, fill: Any, trained: Any) -> Any:
        return write(self, max(0, version - 1), fill, trained)

    patch.setattr(Checkpoints, "write", late)


def _answered_before_it_is_on_disk(patch: pytest.MonkeyPatch) -> None:
    write = Commits._write_in_thread

    def at_once(self: Commits, disk: Any, answers: Any) -> None:
        write(self, disk, answers)
        self._written(answers)

    patch.setattr(Commits, "_write_in_thread", at_once)


def _silence_of_dataflow_is_that_of_the_others(patch: pytest.MonkeyPatch) -> None:
    """It was stopped, and buries whoever could not be heard."""
    patch.setattr(sweeps_module, "_hear_again", lambda *_: None)


MUTATIONS: tuple[Mutation, ...] = (
    _no_undo,
    _no_staleness_sweep,
    _rows_move,
    _leases_never_end,
    _refused_calls_leave_traces,
    _algorithms_forget,
    _trainers_are_not_fenced,
    _serials_repeat,
    _samples_forgotten_at_undo,
    _checkpoints_lie,
    _answered_before_it_is_on_disk,
    _silence_of_dataflow_is_that_of_the_others,
)


def _harsh(seed: int) -> Plan:
    """Every history has evaluations, a bad network and workers that die of it; in every second one trainers are
    replaced quickly, while calls of the one before are still on their way, or by others that live beside them; in every
    third one dataflow is stopped."""
    plan = Plan.draw(seed)
    deaths = tuple(Act(at_s=at, what="worker", pick=at % 1, seconds=30.0) for at in (6.3, 13.1, 22.7, 31.5))
    replaced = tuple(Act(at_s=at, what="trainer", pick=at % 1, seconds=0.2) for at in (4.2, 7.9, 11.4, 16.8, 24.6))
    seconds = tuple(Act(at_s=at, what=SECOND, pick=at % 1, seconds=30.0) for at in (5.2, 9.9, 14.3, 20.6))
    stopped = (Act(at_s=10.0, what="dataflow_paused", pick=0.0, seconds=15.0),) if seed % 3 == 2 else ()
    acts = in_order(*plan.acts, *deaths, *(replaced if seed % 2 else seconds), *stopped)
    return dataclasses.replace(plan, evaluate=True, faults=Faults.some(0.1, patience_s=60.0), acts=acts)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.__name__.strip("_"))
def test_a_seeded_bug_is_found(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    for seed in range(MOST_SEEDS):
        try:
            simulate(seed, _harsh(seed))
        except Exception as error:  # noqa: BLE001 - whatever shows it: a broken invariant, a hang, a component's error
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:300]}")
            return
    pytest.fail(f"{MOST_SEEDS} seeds did not find it")
