"""Where runs and epochs end: exactly the asked steps, the last evaluation done, a balanced ledger, no task skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from astraflow.algorithms.curate import Shuffled
from astraflow.dataflow.settings import EvalSpec, Limits, PolicySpec, RunSpec
from astraflow.errors import Fenced
from astraflow.observe.waits import WaitReason
from astraflow.types import Purpose
from tests.unit.dataflow.rig import Rig, make_spec, manifest, tasks

ROWS = 8
STEPS = 12


def admitted(rig: Rig) -> list[str]:
    """Task keys in the order in which their groups were opened."""
    return [key for (key,) in rig.db.all("SELECT task_key FROM groups WHERE purpose = 'train' ORDER BY id")]


def trained(rig: Rig) -> list[str]:
    return [
        key
        for (key,) in rig.db.all(
            "SELECT g.task_key FROM batches b JOIN batch_groups x ON x.batch = b.id JOIN groups g ON g.id = x.group_id "
            "WHERE b.state = 'committed' ORDER BY b.version, x.position"
        )
    ]


def on_policy(**more: object) -> RunSpec:
    """8 rows, 2 groups a batch: 4 steps an epoch, nothing in advance."""
    curate = Shuffled(tasks(ROWS), group_size=2, seed=3)
    return make_spec(steps=STEPS, max_staleness=0, curate=curate, **more)  # type: ignore[arg-type]


def uninterrupted() -> list[str]:
    with Rig(on_policy()) as rig:
        epoch = rig.resume()
        for _ in range(STEPS):
            rig.step(epoch)
        return trained(rig)


def test_three_epochs_see_every_row_three_times() -> None:
    rows = uninterrupted()
    epochs = [rows[at : at + ROWS] for at in range(0, len(rows), ROWS)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(f"tasks-{i}" for i in range(ROWS))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3, "each in an order of its own"


@pytest.mark.parametrize("stop", range(1, STEPS))
def test_f67_rows_after_a_stop_at_any_step_are_those_of_the_whole_run(stop: int, tmp_path: Path) -> None:
    """Also at 4 and 8, the borders of epochs: none is skipped, none repeated."""
    spec = on_policy()
    with Rig(spec, folder=tmp_path) as rig:
        epoch = rig.resume()
        for _ in range(stop):
            rig.step(epoch)
        rig.restart(on_policy())
        epoch = rig.resume(incarnation="again")
        for _ in range(STEPS - stop):
            rig.step(epoch)
        assert trained(rig) == uninterrupted()
        rig.balanced()


@pytest.mark.parametrize("back", [4, 3])
def test_f67_a_trainer_that_comes_back_behind_a_border_repeats_the_same_rows(back: int) -> None:
    with Rig(on_policy()) as rig:
        epoch = rig.resume()
        for _ in range(5):
            rig.step(epoch)
        epoch = rig.resume_at("p", back, manifest("p", back).digest, incarnation="older").trainer_epoch
        for _ in range(5 - back):
            rig.commit(rig.take(epoch), salt="again")
        for _ in range(STEPS - 5):
            rig.step(epoch)
        assert trained(rig) == uninterrupted()


def test_f69_after_a_restart_nothing_is_paused() -> None:
    """Stopped in the middle of an evaluation and of a drain: the first lease comes at once."""
    evals = EvalSpec(tasks=tasks(2, name="held"), count=2, every=1)
    with Rig(on_policy(evals=evals)) as rig:
        from astraflow.wire.messages import OperatorRequest

        rig.leases(1)
        rig.go(rig.flow.operate(OperatorRequest(action="drain", worker="w")))
        assert not rig.lease().leases
        rig.restart(on_policy(evals=evals))
        assert rig.lease(worker="v").leases, "at once"
        rig.advance(4)  # as long as the old process might still be there
        assert rig.lease(incarnation="new").leases, "a drain is of a process, not of a name"


# ── exactly so many steps ──


def test_exactly_the_asked_steps_and_not_one_more() -> None:
    with Rig(make_spec(steps=3, max_staleness=2)) as rig:
        epoch = rig.resume()
        rig.play_groups(6)
        for version in range(1, 4):
            reply = rig.commit(rig.take(epoch))
            assert (reply.version, reply.finished) == (version, version == 3)
        assert rig.batch(epoch).finished
        lease = rig.lease()
        assert (lease.finished, lease.leases, lease.reason) == (True, (), WaitReason.FINISHED)
        assert rig.db.all("SELECT COUNT(*) FROM batches") == [(3,)]
        assert len(admitted(rig)) == 6, "no group was opened that no step could use"
        rig.balanced()


def test_a_step_without_signal_is_no_step() -> None:
    with Rig(make_spec(steps=2)) as rig:
        epoch = rig.resume()
        rig.step(epoch)
        rig.play_groups(2)
        assert not rig.commit(rig.take(epoch), reason="no_signal").finished
        rig.play_groups(2)
        assert rig.commit(rig.take(epoch)).finished
        assert rig.service.ledger.policies.versions == {"p": 2}


def test_the_run_ends_with_its_slowest_policy() -> None:
    policies = {"a": PolicySpec(groups_per_batch=1), "b": PolicySpec(groups_per_batch=2)}
    with Rig(make_spec(steps=2, policies=policies)) as rig:
        epochs = {name: rig.resume(name) for name in policies}
        while rig.service.ledger.state == "running":
            rig.play_groups(1)
            for name, epoch in epochs.items():
                reply = rig.batch(epoch, name)
                if reply.batch is not None:
                    rig.commit(reply.batch)
        assert rig.service.ledger.policies.versions == {"a": 2, "b": 2}
        rig.balanced()


def test_the_evaluation_after_the_last_step_is_always_done() -> None:
    """Also where its interval does not fall on the last step, and where its worker dies."""
    evals = EvalSpec(tasks=tasks(2, name="held"), count=2, every=5, at_start=False)
    with Rig(make_spec(steps=3, evals=evals, limits=Limits(max_attempts=9))) as rig:
        epoch = rig.resume()
        for _ in range(3):
            rig.step(epoch)
        assert (rig.service.ledger.state, rig.batch(epoch).finished) == ("running", True)
        leases = rig.leases(2)
        assert {(lease.purpose, lease.versions["p"]) for lease in leases} == {(Purpose.EVAL, 3)}
        rig.advance(11)  # whoever played it is dead
        for lease in rig.leases(2, worker="b"):
            assert lease.attempt == 2
            rig.submit(lease, 0.5, worker="b")
        assert rig.service.ledger.state == "finished"
        assert [(p.version, p.score, p.coverage) for p in rig.go(rig.flow.status()).evals] == [(3, 0.5, 1.0)]
        rig.balanced()


def test_a_finished_run_takes_nothing_more_after_a_restart() -> None:
    with Rig(make_spec(steps=1)) as rig:
        epoch = rig.resume()
        rig.step(epoch)
        assert rig.service.ledger.state == "finished"
        before = rig.db.all("SELECT id, kind FROM events WHERE kind <> 'dataflow_started'")
        rig.restart()
        assert rig.lease().finished
        assert rig.resume_at("p", 1, manifest("p", 1).digest, incarnation="again").finished
        assert rig.service.ledger.state == "finished"
        after = rig.db.all("SELECT id, kind FROM events WHERE kind <> 'dataflow_started'")
        assert {kind for _, kind in after[len(before) :]} <= {"joined", "resumed", "alive"}
        with pytest.raises(Fenced):
            rig.batch(epoch)


# ── a dataset smaller than a batch ──


def test_a_dataset_smaller_than_a_batch_comes_round_again() -> None:
    """Three rows, batches of four: the first row of the second epoch is the fourth group, every row counts alike."""
    curate = Shuffled(tasks(3), group_size=2, seed=1)
    with Rig(make_spec(steps=3, groups_per_batch=4, max_staleness=0, curate=curate)) as rig:
        epoch = rig.resume()
        for _ in range(3):
            batch = rig.step(epoch)
            groups = {int(row.sample_id.split("/")[0]) for row in batch.rows}
            assert len(groups) == 4, "two groups of one task are two groups"
        rows = trained(rig)
        assert sorted(rows) == sorted(f"tasks-{i}" for i in range(3) for _ in range(4))
        assert rig.service.ledger.state == "finished"
        rig.balanced()
