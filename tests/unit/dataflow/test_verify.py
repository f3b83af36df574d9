"""What the events tell is what the tables say, through everything that can happen; a row that was changed is found."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow.settings import EvalSpec, Limits, PolicySpec, RunSpec
from astraflow.dataflow.verify import verify
from astraflow.types import Batch, FailureKind
from astraflow.wire import messages as m
from tests.unit.dataflow.rig import KEEP, Rig, make_spec, tasks


def differences(rig: Rig) -> tuple[str, ...]:
    return verify(rig.service.ledger.store.connection).differences


def rich_spec() -> RunSpec:
    evals = EvalSpec(tasks=tasks(4, name="held"), count=2, every=2)
    return make_spec(steps=9, max_staleness=0, evals=evals, limits=Limits(eval_share=1))


def play_some(rig: Rig) -> None:
    for lease in rig.lease(8).leases:
        rig.submit(lease, float(lease.index % 2))


def next_batch(rig: Rig, epoch: int) -> Batch:
    for _ in range(10):
        reply = rig.batch(epoch)
        if reply.batch is not None:
            return reply.batch
        play_some(rig)
    raise AssertionError("no batch comes")


def play_rich(rig: Rig) -> None:
    """Retries, a hand-back, a death, evaluations, a batch without signal, one that failed, an undone step, pruning."""
    evaluated, failed, back, late, *others = rig.lease(8).leases
    rig.submit(evaluated, 1.0)
    rig.submit_failed(failed, FailureKind.INFRA)
    rig.go(rig.flow.hand_back(_hand_back(back.id)))
    for lease in others:
        rig.submit(lease, 0.5)
    rig.advance(11.0)  # the late one's lease expires
    epoch = rig.resume()
    rig.go(rig.flow.fail(_fail(next_batch(rig, epoch))))
    rig.commit(rig.take(epoch), reason="no_signal")
    assert late.attempt == 1
    for step in range(4):
        rig.commit(next_batch(rig, epoch), oldest=max(0, step - 1) or None)
        rig.advance(1.0)
    epoch = rig.resume_at("p", 3, rig.digest_at(3), incarnation="t2").trainer_epoch
    rig.commit(next_batch(rig, epoch))
    rig.lease(2)


def _hand_back(lease: str) -> Any:
    return m.HandBackRequest(worker="w", held=(lease,))


def _fail(batch: Batch) -> Any:
    return m.FailRequest(
        policy="p", batch=batch.id, failures=batch.failures, trainer_epoch=batch.trainer_epoch, error="boom"
    )


@pytest.fixture
def run() -> Any:
    with Rig(rich_spec()) as rig:
        play_rich(rig)
        yield rig


def test_a_run_with_every_kind_of_event_is_verified(run: Rig) -> None:
    found = verify(run.service.ledger.store.connection)
    assert found.differences == ()
    assert found.events == run.db.number("SELECT COUNT(*) FROM events")
    assert found.rows > 80
    kinds = {kind for (kind,) in run.db.all("SELECT DISTINCT kind FROM events")}
    assert kinds >= {
        "admitted", "leased", "handed_back", "failed", "done", "ready", "kept", "cut", "issued", "batch_failed",
        "batch_dropped", "committed", "undone", "resumed", "published", "pruned", "eval_opened", "eval_done", "joined",
    }  # fmt: skip


TAMPERED = {
    "meta": "UPDATE meta SET value = 'finished' WHERE key = 'state'",
    "policies": "UPDATE policies SET version = version - 1",
    "policies: epoch": "UPDATE policies SET trainer_epoch = 99",
    "publications": "UPDATE publications SET digest = 'f' WHERE serial = 2",
    "publications: gone": "DELETE FROM publications WHERE serial = 2",
    "trainers": "UPDATE trainers SET version = 1",
    "components": "UPDATE components SET state = 'dead' WHERE component = 'trainer'",
    "evals": "UPDATE evals SET score = 1.0 WHERE id = 1",
    "groups": "UPDATE groups SET left_episodes = 1 WHERE id = 5",
    "groups: state": "UPDATE groups SET state = 'open' WHERE id = 5",
    "group_policy": "UPDATE group_policy SET reason = 'zero_variance' WHERE state = 'dropped'",
    "group_policy: version": "UPDATE group_policy SET version = version + 1 WHERE state = 'trained'",
    "episodes": "UPDATE episodes SET state = 'pending' WHERE state = 'leased'",
    "episodes: score": "UPDATE episodes SET score = 0.25 WHERE group_id = 5 AND idx = 0",
    "episodes: attempt": "UPDATE episodes SET attempt = 3 WHERE group_id = 5 AND idx = 0",
    "episodes: worker": "UPDATE episodes SET worker = 'zz' WHERE group_id = 5 AND idx = 0",
    "episodes: gone": "DELETE FROM episodes WHERE group_id = 5 AND idx = 1",
    "payloads": "DELETE FROM payloads WHERE id = (SELECT MAX(id) FROM payloads)",
    "payloads: emptied": "UPDATE payloads SET body = NULL WHERE id = (SELECT MAX(id) FROM payloads)",
    "payloads: made up": "INSERT INTO payloads VALUES (NULL, 999, 0, 1, NULL, x'00')",
    "pruned_groups": "DELETE FROM pruned_groups WHERE group_id = (SELECT MIN(group_id) FROM pruned_groups)",
    "samples": "DELETE FROM samples WHERE group_id = (SELECT MAX(group_id) FROM samples)",
    "samples: state": "UPDATE samples SET state = 'masked' WHERE group_id = (SELECT MAX(group_id) FROM samples)",
    "batches": "UPDATE batches SET reason = 'non_finite' WHERE state = 'dropped'",
    "batches: pruned": "UPDATE batches SET rows = NULL, file = NULL",
    "batches: gone": "DELETE FROM batches WHERE id = 2",
    "batch_rows": "DELETE FROM batch_rows WHERE batch = (SELECT MAX(batch) FROM batch_rows)",
    "batch_rows: made up": "INSERT INTO batch_rows VALUES (999, x'00')",
    "batch_groups": "UPDATE batch_groups SET position = 9 WHERE batch = 2 AND position = 0",
    "counters": "UPDATE counters SET value = value + 1 WHERE name = 'episodes_done'",
    "counters: retries": "UPDATE counters SET value = value - 1 WHERE name = 'retries'",
    "counters: failed": "UPDATE counters SET value = value + 1 WHERE name = 'failed/infra'",
    "counters: handed back": "DELETE FROM counters WHERE name = 'handed_back'",
    "counters: undone": "UPDATE counters SET value = 0 WHERE name = 'undone_batches'",
    "counters: dead": "UPDATE counters SET value = 5 WHERE name = 'dead/rollout'",
    "counters: made up": "INSERT INTO counters VALUES ('failed/grader', 1)",
    "policies: no_signal": "UPDATE policies SET no_signal = no_signal + 1",
    "policies: barren": "UPDATE policies SET barren = barren + 1",
    "algorithms": "UPDATE algorithms SET state = x'80'",
    "algorithms: gone": "DELETE FROM algorithms",
    "events: algorithms": "UPDATE events SET data = '{\"digest\":\"0\"}' WHERE kind = 'algorithms'",
    "events: gone": "DELETE FROM events WHERE kind = 'done' AND group_id = 5 AND idx = 0",
    "events: changed": "UPDATE events SET group_id = 999 WHERE kind = 'ready' AND group_id = 5",
    "events: torn": "UPDATE events SET data = '{' WHERE kind = 'kept'",
}


@pytest.mark.parametrize("what", TAMPERED)
def test_a_tampered_row_is_found(run: Rig, what: str) -> None:
    changed = run.db.run(TAMPERED[what]).rowcount
    assert changed > 0, "the tampering hit no row"
    found = differences(run)
    assert found
    assert all("\n" not in line for line in found)


def test_each_difference_is_named_in_words(run: Rig) -> None:
    run.db.run("UPDATE episodes SET state = 'given_up' WHERE group_id = 5 AND idx = 0")
    run.db.run("UPDATE policies SET version = 7")
    lines = differences(run)
    assert "policy p: version is 7, the events tell 4" in lines
    assert "episode 5/0: state is 'given_up', the events tell 'done'" in lines
    assert len(lines) == 2


def test_a_file_that_is_gone_is_found(tmp_path: Path) -> None:
    with Rig(folder=tmp_path) as rig:
        rig.play_groups(1)
        name = "a" * 64
        rig.db.run("UPDATE payloads SET file = ?, body = NULL WHERE idx = 0", (name,))
        folder = tmp_path / "payloads"
        connection = rig.service.ledger.store.connection
        assert verify(connection, folder).differences == (f"bytes of episode 1/0: file {name} is missing",)
        (folder / name).write_bytes(b"x")
        assert verify(connection, folder).differences == ()


def test_events_of_an_older_program_are_not_held_against_it(run: Rig) -> None:
    """It did not log how many samples were stored or masked."""
    run.db.run("UPDATE events SET data = json_remove(data, '$.samples', '$.masked') WHERE kind IN ('done', 'cut')")
    assert differences(run) == ()


def test_two_policies_a_cancelled_group_and_a_roll_back() -> None:
    policies = {name: PolicySpec(max_staleness=1, groups_per_batch=1) for name in ("p", "q")}
    with Rig(make_spec(steps=9, policies=policies)) as rig:
        epochs = {name: rig.resume(name) for name in policies}
        slow = rig.leases(2)
        for _ in range(3):
            rig.play_groups(1)
            for name, epoch in epochs.items():
                rig.commit(rig.take(epoch, name))
            assert differences(rig) == ()
        assert rig.db.one("SELECT state FROM groups WHERE id = ?", slow[0].group) == ("closed",)
        rig.roll_back(1)
        assert differences(rig) == ()
        assert rig.group(3)[1] == "rolled_back"


def _finished(rig: Rig) -> None:
    epoch = rig.resume()
    for _ in range(3):
        rig.step(epoch)
    assert rig.service.ledger.state == "finished"


def _undone_after_the_end(rig: Rig) -> None:
    _finished(rig)
    rig.resume_at("p", 1, rig.digest_at(1), incarnation="t2")


def _redone(rig: Rig) -> None:
    """The trainer's newest checkpoint was lost for a while: it comes back with weights that were un-committed."""
    epoch = rig.resume()
    rig.step(epoch)
    rig.step(epoch)
    digest = rig.digest_at(2)
    rig.resume_at("p", 0, rig.digest_at(0), incarnation="t2")
    rig.resume_at("p", 2, digest, incarnation="t3")
    assert rig.db.number("SELECT COUNT(*) FROM events WHERE kind = 'committed_again'") == 2


def _failed_and_went_on(rig: Rig) -> None:
    for action in ("stop", "resume"):
        rig.go(rig.flow.operate(m.OperatorRequest(action=action, error="boom")))


@pytest.mark.parametrize("play", [_finished, _undone_after_the_end, _redone, _failed_and_went_on])
def test_ends_and_new_beginnings(play: Callable[[Rig], None]) -> None:
    with Rig(make_spec(steps=3)) as rig:
        play(rig)
        assert differences(rig) == ()
        rig.restart()
        assert differences(rig) == ()


def test_it_reads_one_snapshot_beside_the_writer(tmp_path: Path) -> None:
    with Rig(folder=tmp_path) as rig:
        epoch = rig.resume()
        reader = sqlite3.connect(f"file:{tmp_path / 'run.db'}?mode=ro", uri=True, isolation_level=None)
        count = 0

        def write_between(statement: str) -> None:
            nonlocal count
            if count < 1 and "FROM policies" in statement:
                count += 1
                rig.step(epoch)

        reader.set_trace_callback(write_between)
        assert verify(reader).differences == ()
        assert count == 1
        reader.close()


NAMED = {
    "UPDATE counters SET value = 0 WHERE name = 'retries'": "counter retries: value is 0.0, the events tell 2",
    "UPDATE policies SET barren = 41": "policy p: barren is 41, the events tell 0",
    "UPDATE policies SET no_signal = 3": "policy p: no_signal is 3, the events tell 0",
    "DELETE FROM algorithms": "state of the algorithms: the events tell of it, no row does",
}


@pytest.mark.parametrize("tampering", NAMED)
def test_what_is_counted_and_what_the_algorithms_know_is_named(run: Rig, tampering: str) -> None:
    run.db.run(tampering)
    assert differences(run) == (NAMED[tampering],)


def test_a_state_of_the_algorithms_from_before_the_last_decision_is_found() -> None:
    with Rig() as rig:
        rig.play_groups(1)
        (before,) = rig.db.one("SELECT state FROM algorithms")
        rig.play_groups(1)
        assert differences(rig) == () and rig.db.one("SELECT state FROM algorithms") != (before,)
        rig.db.run("UPDATE algorithms SET state = ?", (before,))
        (line,) = differences(rig)
        assert line.startswith("state of the algorithms: digest is ")


def test_what_no_event_tells_is_said_and_not_compared(run: Rig) -> None:
    """A result that comes twice, and one of an attempt that was replaced, change nothing but a counter."""
    store = run.service.ledger.store
    lease = run.lease(1, worker="v").leases[0]
    run.submit(lease, 1.0, worker="v")
    assert run.submit(lease, 1.0, worker="v").duplicate
    run.db.run("UPDATE counters SET value = 77 WHERE name = 'duplicates'")
    found = verify(store.connection)
    assert found.differences == ()
    assert found.not_compared == ("counter duplicates: what it counts changes nothing and leaves no event",)
    run.db.run("DELETE FROM events WHERE kind = 'algorithms'")
    numbers = [number for (number,) in run.db.all("SELECT id FROM events ORDER BY id")]
    run.db.run_many("UPDATE events SET id = ? WHERE id = ?", list(enumerate(numbers, start=1)))
    found = verify(store.connection)
    assert found.differences == ()
    assert found.not_compared[1] == "state of the algorithms: the events are of a program that did not tell it"


def test_a_late_result_is_told_from_the_state_before_it() -> None:
    with Rig() as rig:
        (lease,) = rig.leases(1)
        rig.advance(11.0)
        assert rig.states("episodes")["pending"] == 2
        rig.submit(lease, 1.0)
        assert rig.db.counter("late") == 1
        assert differences(rig) == ()
        rig.db.run("UPDATE counters SET value = 2 WHERE name = 'late'")
        assert differences(rig) == ("counter late: value is 2.0, the events tell 1",)


def test_groups_in_a_row_that_were_not_kept_are_told_but_not_across_a_spell_of_starving() -> None:
    limits = Limits(barren_groups=3, no_signal_limit=1, when_starved="wait")
    with Rig(make_spec(groups_per_batch=1, keep=[KEEP()], limits=limits, steps=30)) as rig:
        rig.renew()

        def dull(count: int) -> None:
            for lease in rig.leases(2 * count):
                rig.submit(lease, 1.0)

        dull(1)
        dull(1)
        assert rig.db.one("SELECT barren FROM policies") == (2,)
        assert verify(rig.service.ledger.store.connection).not_compared == () == differences(rig)
        dull(1)
        assert rig.db.counter("starved") == 1 and rig.db.one("SELECT barren FROM policies") == (0,)
        dull(1)
        found = verify(rig.service.ledger.store.connection)
        assert found.differences == ()
        assert [line.split(",")[0] for line in found.not_compared] == ["policy p: no_signal", "policy p: barren"]
        rig.play_groups(1)
        rig.commit(rig.take(rig.resume()))
        rig.play_groups(1)
        dull(1)
        assert verify(rig.service.ledger.store.connection).not_compared == () == differences(rig)
        rig.db.run("UPDATE policies SET barren = 0")
        assert differences(rig) == ("policy p: barren is 0, the events tell 1",)
