"""Batches: frozen, issued again identically, committed once, undone, fenced, rolled back."""

from __future__ import annotations

import msgspec
import pytest

from astraflow.dataflow.settings import Limits, PolicySpec
from astraflow.errors import BadRequest, Fenced, RunFailed, Starved, UnknownVersion, VersionConflict
from astraflow.observe.waits import WaitReason
from astraflow.types import Batch
from astraflow.wire import messages as m
from astraflow.wire.codec import encode
from tests.unit.dataflow.rig import Rig, make_spec, manifest


def bytes_of(batch: Batch) -> bytes:
    """What must never change: rows, their order, the denominators."""
    return encode(msgspec.structs.replace(batch, trainer_epoch=0, version=0))


def test_no_batch_yet_says_what_is_missing() -> None:
    with Rig() as rig:
        epoch = rig.resume()
        rig.play_groups(1)
        reply = rig.batch(epoch)
        assert reply.batch is None
        assert reply.reason == WaitReason.NO_READY
        assert "1/2 groups kept" in reply.why


def test_guarantee_batch_reissued_identical() -> None:
    with Rig() as rig:
        epoch = rig.resume()
        rig.play_groups(4)
        batch = rig.take(epoch)
        assert encode(rig.take(epoch)) == encode(batch)
        again = rig.resume(incarnation="t2")
        assert again == epoch + 1
        assert bytes_of(rig.take(again)) == bytes_of(batch)
        rig.restart()
        assert bytes_of(rig.take(again)) == bytes_of(batch)


def test_a_trainer_that_never_resumed_gets_no_batch() -> None:
    with Rig() as rig:
        for epoch in (0, 5):
            with pytest.raises(BadRequest, match="resume first"):
                rig.batch(epoch)


def test_a_frozen_policy_has_no_batches() -> None:
    spec = make_spec(policies={"p": PolicySpec(), "judge": PolicySpec(trainable=False)})
    with Rig(spec) as rig, pytest.raises(BadRequest, match="no trainable policy 'judge'"):
        rig.batch(1, "judge")


def test_guarantee_version_monotonic_only_commit_advances() -> None:
    with Rig() as rig:
        epoch = rig.resume()
        for step in range(3):
            batch = rig.step(epoch)
            assert batch.version == step
            assert rig.digest("p")[0] == step + 1
        serials = [row[0] for row in rig.db.all("SELECT serial FROM publications ORDER BY serial")]
        assert serials == [1, 2, 3, 4]


def test_a_repeated_commit_is_acknowledged() -> None:
    with Rig() as rig:
        batch = rig.step(rig.resume())
        reply = rig.commit(batch)
        assert (reply.duplicate, reply.version) == (True, 1)
        assert rig.db.number("SELECT COUNT(*) FROM publications") == 2
        rig.balanced()


def test_a_second_commit_with_other_weights_is_refused() -> None:
    with Rig() as rig:
        batch = rig.step(rig.resume())
        with pytest.raises(VersionConflict):
            rig.commit(batch, salt="other")


def test_a_manifest_of_the_wrong_version_is_refused() -> None:
    with Rig() as rig:
        epoch = rig.resume()
        rig.play_groups(2)
        batch = rig.take(epoch)
        with pytest.raises(VersionConflict, match="makes version 1"):
            rig.commit(msgspec.structs.replace(batch, version=4))
        rig.commit(batch)


def test_an_older_trainer_is_fenced_from_every_call() -> None:
    with Rig() as rig:
        old = rig.resume(incarnation="zombie")
        rig.play_groups(2)
        batch = rig.take(old)
        rig.resume(incarnation="new")
        fail = m.FailRequest(policy="p", batch=batch.id, failures=batch.failures, trainer_epoch=old, error="x")
        for call in (lambda: rig.commit(batch), lambda: rig.batch(old), lambda: rig.go(rig.flow.fail(fail))):
            with pytest.raises(Fenced, match="a newer trainer resumed"):
                call()
        assert rig.db.counter("fenced") == 3
        assert rig.digest("p")[0] == 0


def test_a_new_trainer_must_ask_for_a_batch_before_it_commits_it() -> None:
    with Rig() as rig:
        epoch = rig.resume()
        rig.play_groups(2)
        batch = rig.take(epoch)
        again = rig.resume(incarnation="t2")
        stolen = msgspec.structs.replace(batch, trainer_epoch=again)
        with pytest.raises(VersionConflict, match="ask for the next batch"):
            rig.commit(stolen)


def test_a_batch_of_another_policy_or_run_is_refused() -> None:
    with Rig() as rig:
        epoch = rig.resume()
        rig.play_groups(2)
        batch = rig.take(epoch)
        with pytest.raises(BadRequest, match="has no batch 77"):
            rig.commit(msgspec.structs.replace(batch, id=77))


def test_a_repeated_resume_changes_nothing() -> None:
    with Rig() as rig:
        first = rig.resume()
        assert rig.resume() == first
        assert rig.resume(incarnation="t2") == first + 1


def test_a_commit_needs_a_manifest_or_a_reason() -> None:
    with Rig() as rig:
        epoch = rig.resume()
        rig.play_groups(2)
        batch = rig.take(epoch)
        with pytest.raises(BadRequest, match="neither a manifest nor a reason"):
            rig.go(rig.flow.commit(m.CommitRequest(policy="p", batch=batch.id, trainer_epoch=epoch)))


def test_a_step_without_signal_drops_its_groups_and_keeps_the_version() -> None:
    with Rig() as rig:
        epoch = rig.resume()
        rig.play_groups(2)
        batch = rig.take(epoch)
        reply = rig.commit(batch, reason="no_signal")
        assert (reply.version, reply.duplicate) == (0, False)
        assert rig.commit(batch, reason="no_signal").duplicate
        assert rig.group(1) == ("dropped", "no_signal")
        assert rig.states("samples") == {"dropped": 4}
        rig.balanced()
        assert rig.step(epoch).version == 0


def test_ten_batches_in_a_row_without_signal_starve_the_run() -> None:
    with Rig() as rig:
        epoch = rig.resume()
        for _ in range(10):
            assert rig.service.ledger.state == "running"
            rig.play_groups(2)
            rig.commit(rig.take(epoch), reason="no_signal")
        with pytest.raises(Starved, match="10 batches in a row"):
            rig.batch(epoch)
        assert rig.lease().finished
        assert "Starved" in (rig.go(rig.flow.status()).error or "")


def test_a_real_step_in_between_starts_the_count_anew() -> None:
    with Rig(make_spec(steps=9)) as rig:
        epoch = rig.resume()
        for turn in range(18):
            rig.play_groups(2)
            rig.commit(rig.take(epoch), reason=None if turn == 9 else "no_signal")
        assert rig.service.ledger.state == "running"


def test_a_batch_that_kills_its_trainer_three_times_stops_the_run_and_is_named() -> None:
    with Rig() as rig:
        rig.play_groups(2)
        for times in range(1, 4):
            epoch = rig.resume(incarnation=f"t{times}")
            batch = rig.take(epoch)
            fail = m.FailRequest(
                policy="p", batch=batch.id, failures=batch.failures, trainer_epoch=epoch, error="out of memory"
            )
            reply = rig.go(rig.flow.fail(fail))
            assert (reply.failures, reply.stop) == (times, times == 3)
            assert rig.go(rig.flow.fail(fail)).failures == times
        with pytest.raises(RunFailed, match=rf"batch {batch.id} of policy p failed its trainer 3 times.*out of memory"):
            rig.batch(epoch)


def test_a_failure_that_comes_late_is_not_counted_again() -> None:
    """Sent twice, its copy arrives when the batch is issued again to a late request of the same trainer: it
    neither counts nor takes the batch from whoever trains it now."""
    with Rig() as rig:
        rig.play_groups(2)
        epoch = rig.resume(incarnation="t1")
        first = rig.take(epoch)
        fail = m.FailRequest(
            policy="p", batch=first.id, failures=first.failures, trainer_epoch=epoch, error="out of memory"
        )
        assert (first.failures, rig.go(rig.flow.fail(fail)).failures) == (0, 1)
        again = rig.take(epoch)
        assert (again.id, again.failures) == (first.id, 1)
        assert rig.go(rig.flow.fail(fail)) == m.FailReply(failures=1)
        assert rig.db.one("SELECT state, failures FROM batches WHERE id = ?", first.id) == ("issued", 1)
        rig.commit(again)
        assert rig.service.ledger.state == "running"


def test_f58_step_and_version_numbers_over_a_resume() -> None:
    """Step s starts from version s - 1; a resume at 3 goes on with step 4."""
    with Rig(make_spec(steps=5)) as rig:
        epoch = rig.resume()
        for _ in range(3):
            rig.step(epoch)
        reply = rig.resume_at("p", 3, manifest("p", 3).digest, incarnation="t2")
        assert reply.undone == ()
        assert rig.step(reply.trainer_epoch).version == 3
        assert rig.digest("p")[0] == 4


def test_resume_further_back_uncommits_and_issues_again_in_order() -> None:
    with Rig(make_spec(steps=5)) as rig:
        epoch = rig.resume()
        done = [rig.step(epoch) for _ in range(3)]
        rig.play_groups(2)
        live = rig.take(epoch)
        reply = rig.resume_at("p", 1, manifest("p", 1).digest, incarnation="t2")
        assert reply.undone == (done[1].id, done[2].id)
        assert rig.digest("p") == (1, manifest("p", 1).digest)
        assert rig.states("samples")["held"] == 12
        rig.balanced()
        for before in (done[1], done[2], live):
            again = rig.take(reply.trainer_epoch)
            assert (again.id, again.version) == (before.id, before.version)
            assert bytes_of(again) == bytes_of(before)
            rig.commit(again, salt="anew")
            rig.balanced()
        assert rig.digest("p") == (4, manifest("p", 4, salt="anew").digest)


def test_workers_follow_the_serial_down_and_up_again() -> None:
    with Rig(make_spec(steps=5)) as rig:
        epoch = rig.resume()
        rig.step(epoch)
        rig.step(epoch)
        rig.resume_at("p", 0, manifest("p", 0).digest, incarnation="t2")
        newest = rig.lease(0).manifests["p"]
        assert (newest.version, newest.serial) == (0, 4)


def test_an_uncommitted_batch_without_signal_moves_the_later_ones_down() -> None:
    with Rig(make_spec(steps=5)) as rig:
        epoch = rig.resume()
        rig.step(epoch)
        second = rig.step(epoch)
        reply = rig.resume_at("p", 0, manifest("p", 0).digest, incarnation="t2")
        rig.commit(rig.take(reply.trainer_epoch), reason="non_finite")
        again = rig.take(reply.trainer_epoch)
        assert (again.id, again.version) == (second.id, 0)
        rig.commit(again, salt="x")
        rig.balanced()


def test_weights_of_an_undone_version_are_legal_and_of_age_zero() -> None:
    """A worker still plays version 2 while the trainer went back to 0: published, not yet reached."""
    with Rig(make_spec(steps=9, max_staleness=0, groups_per_batch=1)) as rig:
        epoch = rig.resume()
        rig.step(epoch)
        rig.step(epoch)
        ahead = rig.digest("p")
        epoch = rig.resume_at("p", 0, manifest("p", 0).digest, incarnation="t2").trainer_epoch
        for _ in range(2):
            rig.commit(rig.take(epoch), reason="no_signal")
        for lease in rig.leases(2):
            rig.submit(lease, episode=rig.episode(lease, float(lease.index), spans=[ahead]))
        assert rig.take(epoch).version == 0


def test_a_trainer_with_weights_of_the_undone_history_has_them_committed_again() -> None:
    """It chose an old checkpoint, died before any step, and then found the newer one whole."""
    with Rig(make_spec(steps=5)) as rig:
        epoch = rig.resume()
        done = [rig.step(epoch) for _ in range(2)]
        rig.resume_at("p", 0, manifest("p", 0).digest, incarnation="t2")
        reply = rig.resume_at("p", 2, manifest("p", 2).digest, incarnation="t3")
        assert rig.digest("p")[0] == 2
        rig.balanced()
        assert rig.step(reply.trainer_epoch).id not in {each.id for each in done}


def test_weights_of_a_history_that_was_overwritten_are_refused() -> None:
    with Rig(make_spec(steps=5)) as rig:
        epoch = rig.resume()
        rig.step(epoch)
        rig.step(epoch)
        back = rig.resume_at("p", 0, manifest("p", 0).digest, incarnation="t2")
        rig.commit(rig.take(back.trainer_epoch), salt="anew")
        with pytest.raises(UnknownVersion, match="trained anew"):
            rig.resume_at("p", 2, manifest("p", 2).digest, incarnation="t3")
        assert rig.batch(back.trainer_epoch).batch is not None, "the refused trainer fenced nobody"


def test_weights_that_were_never_published_are_refused() -> None:
    with Rig() as rig, pytest.raises(UnknownVersion, match="never published"):
        rig.resume_at("p", 0, "f" * 64)


def test_a_resume_may_say_where_its_weights_are_now() -> None:
    with Rig() as rig:
        moved = msgspec.structs.replace(
            manifest("p"), files=(msgspec.structs.replace(manifest("p").files[0], sha256="e" * 64),)
        )
        request = m.ResumeRequest(
            policy="p", version=0, digest=moved.digest, trainer="t", incarnation="i", manifest=moved
        )
        rig.go(rig.flow.resume(request))
        assert rig.service.ledger.policies.newest["p"].files[0].sha256 == "e" * 64
        assert rig.service.ledger.policies.newest["p"].serial == 2


def test_rolling_back_on_purpose_drops_what_came_after() -> None:
    with Rig(make_spec(steps=5)) as rig:
        epoch = rig.resume()
        for _ in range(3):
            rig.step(epoch)
        rig.go(rig.flow.operate(m.OperatorRequest(action="rollback", policy="p", version=1)))
        assert rig.digest("p") == (1, manifest("p", 1).digest)
        assert rig.db.one("SELECT COUNT(*) FROM group_policy WHERE reason = 'rolled_back'") == (4,)
        rig.balanced()
        with pytest.raises(Fenced):
            rig.batch(epoch)
        again = rig.resume_at("p", 1, manifest("p", 1).digest, incarnation="t2")
        assert rig.step(again.trainer_epoch).version == 1
        rig.balanced()


def test_an_operation_that_is_none_is_refused() -> None:
    with Rig() as rig:
        for request in (
            m.OperatorRequest(action="explode"),
            m.OperatorRequest(action="rollback", policy="p"),
            m.OperatorRequest(action="rollback", policy="p", version=9),
            m.OperatorRequest(action="drain", worker="nobody"),
        ):
            with pytest.raises(BadRequest):
                rig.go(rig.flow.operate(request))


def test_draining_a_worker_stops_its_leases_and_tells_it() -> None:
    with Rig() as rig:
        rig.leases(1)
        rig.go(rig.flow.operate(m.OperatorRequest(action="drain", worker="w")))
        assert rig.lease().leases == ()
        assert rig.renew().drain


def test_an_operator_stops_the_run_with_its_cause() -> None:
    with Rig() as rig:
        epoch = rig.resume()
        rig.go(rig.flow.operate(m.OperatorRequest(action="stop", error="engine: out of memory")))
        with pytest.raises(RunFailed, match="out of memory"):
            rig.batch(epoch)
        assert rig.renew().finished


def test_f57_age_is_measured_at_use() -> None:
    """A kept group of version 0 is fine on arrival and two steps later no longer, with bound 1."""
    with Rig(make_spec(steps=9, max_staleness=1, groups_per_batch=1)) as rig:
        epoch = rig.resume()
        old = rig.leases(4)
        for lease in old[:2]:
            rig.submit(lease, float(lease.index))
        rig.commit(rig.take(epoch))
        rig.play_groups(1)
        rig.commit(rig.take(epoch))
        assert rig.digest("p")[0] == 2
        row = rig.db.one("SELECT state FROM groups WHERE id = ?", old[2].group)
        assert row == ("closed",), "cancelled early: begun by version 0, now at 2"
        assert rig.group(old[2].group)[0] == "stale"
        rig.balanced()


def test_guarantee_staleness_bound_holds_at_the_cut_for_every_sample() -> None:
    with Rig(make_spec(steps=9, max_staleness=1, groups_per_batch=1)) as rig:
        epoch = rig.resume()
        for _ in range(2):
            rig.step(epoch)
        v0, v1, v2 = ((v, manifest("p", v).digest) for v in range(3))
        a, b = rig.leases(2)
        rig.submit(a, episode=rig.episode(a, 0.0, spans=[v0, v2]))
        rig.submit(b, episode=rig.episode(b, 1.0, spans=[v1]))
        batch = rig.take(epoch)
        assert batch.version == 2
        assert [row.sample_id for row in batch.rows] == [f"{b.group}/1/role_p/0"]
        assert [run.value for run in batch.rows[0].advantages] == pytest.approx([0.7071], abs=1e-3)
        rig.commit(batch)
        rows = rig.db.all("SELECT idx, state, mask, age FROM samples WHERE group_id = ? ORDER BY idx", a.group)
        assert rows == [(0, "masked", "stale", None), (1, "trained", None, 1)]
        status = rig.go(rig.flow.status())
        assert status.policies[0].staleness["1"] >= 1
        rig.balanced()


@pytest.mark.parametrize(("version", "kept"), [(0, False), (1, True), (2, True), (3, True)])
def test_f54_exactly_at_the_bound_is_trained(version: int, kept: bool) -> None:
    """Current 3, bound 2: versions 1, 2, 3 are trained, 0 is not."""
    with Rig(make_spec(steps=9, max_staleness=2, groups_per_batch=1)) as rig:
        epoch = rig.resume()
        for _ in range(3):
            rig.step(epoch)
        spans = [(version, manifest("p", version).digest)]
        for lease in rig.leases(2):
            rig.submit(lease, episode=rig.episode(lease, float(lease.index), spans=spans))
            group = lease.group
        assert (rig.batch(epoch).batch is not None) == kept
        assert rig.group(group)[0] == ("batched" if kept else "stale")


def test_f54_a_version_from_the_future_is_refused() -> None:
    with Rig() as rig:
        lease = rig.leases(1)[0]
        with pytest.raises(UnknownVersion):
            rig.submit(lease, episode=rig.episode(lease, spans=[(11, "0" * 64)]))


def test_f55_bound_zero_goes_on_for_three_steps() -> None:
    """What runs when a version is published is dropped and counted; new groups start under the new version."""
    with Rig(make_spec(max_staleness=0, groups_per_batch=2, limits=Limits(time_limit_s=20))) as rig:
        epoch = rig.resume()
        for step in range(3):
            rig.play_groups(2)
            batch = rig.take(epoch)
            if step == 0:  # a slow one begun under version 0
                rig.service.ledger.groups.admit(0.0, task=rig.spec.pipeline.curate.next().task, size=2)  # type: ignore[union-attr]
                slow = rig.leases(2, worker="slow")
            rig.commit(batch)
            if step == 0:
                assert rig.renew(slow, worker="slow").lost == tuple(x.id for x in slow)
                assert rig.group(slow[0].group)[0] == "stale"
                assert rig.db.counter("cancelled_groups") == 1
            rig.balanced()
        assert rig.service.ledger.state == "finished"


def test_f59_ten_ready_target_eight_then_two() -> None:
    spec = make_spec(steps=9, max_staleness=4, groups_per_batch=8)
    with Rig(spec) as rig:
        rig.play_groups(10)
        epoch = rig.resume()
        first = rig.take(epoch)
        in_order = [str(group) for group in range(1, 9) for _ in range(2)]
        assert [row.sample_id.split("/")[0] for row in first.rows] == in_order, "eight, oldest first, none twice"
        assert rig.states("group_policy") == {"batched": 8, "kept": 2}, "served + held = put"
        rig.balanced()
        rig.commit(first)
        assert "2/8 groups kept" in rig.batch(epoch).why
        rig.play_groups(6)
        second = rig.take(epoch)
        groups = [int(row.sample_id.split("/")[0]) for row in second.rows]
        assert groups == [group for group in range(9, 17) for _ in range(2)], "what was left goes first"
        assert rig.states("group_policy") == {"trained": 8, "batched": 8}


def test_f61_a_full_queue_pushes_back_and_evicts_nothing_that_may_be_served() -> None:
    with Rig(make_spec(steps=9, max_staleness=2, groups_per_batch=1)) as rig:
        rig.play_groups(3)
        reply = rig.lease(2)
        assert (reply.leases, reply.reason) == ((), WaitReason.NO_ROOM)
        epoch = rig.resume()
        for _ in range(3):
            rig.commit(rig.take(epoch))
        assert rig.states("group_policy") == {"trained": 3}


def test_f53_denominators_are_of_trained_rows_only() -> None:
    with Rig(make_spec(group_size=3, groups_per_batch=1, limits=Limits(max_attempts=1))) as rig:
        a, b, c = rig.leases(3)
        rig.submit(a, 0.0)
        rig.submit(b, 1.0)
        rig.submit_failed(c)
        batch = rig.take(rig.resume())
        assert (batch.sequences, batch.tokens) == (2, 4)


def test_guarantee_failed_never_in_baseline() -> None:
    """A failed member that says it has tokens: no gradient, not in the mean, accounted as masked(failed)."""
    from astraflow.types import FailureKind, Outcome

    with Rig(make_spec(group_size=3, groups_per_batch=1, limits=Limits(max_attempts=1))) as rig:
        a, b, c = rig.leases(3)
        rig.submit(a, 0.0)
        rig.submit(b, 1.0)
        broken = msgspec.structs.replace(
            rig.episode(c, 100.0), outcome=Outcome.FAILED, failure=FailureKind.GRADER, error="nan", score=None
        )
        rig.submit(c, episode=broken)
        batch = rig.take(rig.resume())
        assert [run.value for row in batch.rows for run in row.advantages] == pytest.approx([-0.7071, 0.7071], abs=1e-3)
        rig.commit(batch)
        assert rig.db.all("SELECT state, mask FROM samples WHERE idx = 2") == [("masked", "failed")]
        rig.balanced()
