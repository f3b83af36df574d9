"""Leases: order, attempts, renewals, expiry, and what comes back late, twice or never."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from astraflow.dataflow.episodes import episode_seed, parse_lease
from astraflow.dataflow.settings import EvalSpec, Limits
from astraflow.errors import BadRequest, Closed, Fenced, NameTaken, UnknownLease, UnknownVersion
from astraflow.observe.waits import WaitReason
from astraflow.types import Episode, FailureKind, Outcome
from astraflow.wire import messages as m
from tests.unit.dataflow.rig import Rig, make_spec, sample, tasks


def counter(rig: Rig, name: str) -> float:
    return float(rig.db.counter(name))


def test_oldest_episodes_go_first_and_attempts_count_from_one() -> None:
    with Rig() as rig:
        leases = rig.leases(3)
        assert [(x.group, x.index, x.attempt) for x in leases] == [(1, 0, 1), (1, 1, 1), (2, 0, 1)]
        assert leases[0].ttl_s == 10.0
        assert leases[0].time_limit_s == 600.0


def test_a_lease_reply_brings_the_newest_manifest_of_every_policy() -> None:
    with Rig() as rig:
        assert rig.lease().manifests["p"].serial == 1


def test_nothing_is_leased_before_the_initial_weights_are_published() -> None:
    with Rig(publish=False) as rig:
        reply = rig.lease()
        assert reply.leases == ()
        assert not reply.finished


def test_a_worker_without_the_policy_gets_nothing_and_hears_why() -> None:
    with Rig() as rig:
        rig.leases(1)
        reply = rig.lease(policies=["other"], worker="b")
        assert reply.leases == ()
        assert reply.reason == WaitReason.NO_CAPABLE


def test_back_pressure_says_no_room() -> None:
    with Rig(make_spec(max_staleness=0)) as rig:
        rig.leases(4)
        assert rig.lease().reason == WaitReason.NO_ROOM


def test_count_out_of_range_is_refused() -> None:
    with Rig() as rig, pytest.raises(BadRequest, match=r"in \[0, 4096\], found 5000"):
        rig.lease(5000)


def test_renewal_keeps_a_lease_beyond_its_first_term() -> None:
    with Rig() as rig:
        lease = rig.leases(1)
        for _ in range(5):
            rig.advance(8)
            assert rig.renew(lease).lost == ()
        assert rig.states("episodes")["leased"] == 1


def test_an_expired_lease_is_pending_again_and_its_renewal_is_lost() -> None:
    with Rig() as rig:
        lease = rig.leases(1)
        rig.advance(10)
        assert rig.states("episodes") == {"pending": 2}
        assert rig.renew(lease).lost == (lease[0].id,)


def test_the_time_limit_ends_a_lease_whatever_is_renewed() -> None:
    with Rig(make_spec(limits=Limits(time_limit_s=30, grace_s=5))) as rig:
        lease = rig.leases(1)
        for _ in range(4):
            rig.advance(8)
            rig.renew(lease)
        assert rig.states("episodes")["leased"] == 1
        rig.advance(8)
        assert rig.states("episodes") == {"pending": 2}
        assert counter(rig, "failed/timeout") == 1


def test_handing_back_is_no_failure() -> None:
    from astraflow.wire.messages import HandBackRequest

    with Rig() as rig:
        lease = rig.leases(1)[0]
        rig.go(rig.flow.hand_back(HandBackRequest(worker="w", held=(lease.id,))))
        assert rig.db.one("SELECT state, failures FROM episodes WHERE idx = 0") == ("pending", 0)
        again = rig.leases(1)[0]
        assert (again.id, again.seed) != (lease.id, lease.seed)
        assert again.attempt == 2


def test_handing_back_what_another_worker_holds_changes_nothing() -> None:
    from astraflow.wire.messages import HandBackRequest

    with Rig() as rig:
        lease = rig.leases(1, worker="a")[0]
        rig.go(rig.flow.hand_back(HandBackRequest(worker="b", held=(lease.id,))))
        assert rig.states("episodes")["leased"] == 1


@pytest.mark.parametrize("lease", ["", "1/2", "1/2/3/4", "a/b/c", "1/-2/3", "1/2/\u0663", "9" * 30 + "/1/1"])
def test_a_lease_id_that_is_none_is_refused(lease: str) -> None:
    with pytest.raises(BadRequest, match="group/index/attempt"):
        parse_lease(lease)


def test_guarantee_stored_once_a_duplicate_is_acknowledged() -> None:
    with Rig() as rig:
        lease = rig.leases(1)[0]
        assert not rig.submit(lease, 1.0).duplicate
        assert rig.submit(lease, 0.0).duplicate
        assert rig.db.one("SELECT score FROM episodes WHERE idx = 0") == (1.0,)
        assert counter(rig, "duplicates") == 1
        rig.balanced()


def test_a_late_result_of_the_same_attempt_is_accepted() -> None:
    with Rig() as rig:
        lease = rig.leases(1)[0]
        rig.advance(20)
        assert not rig.submit(lease).duplicate
        assert rig.states("episodes")["done"] == 1
        assert counter(rig, "late") == 1


def test_f89_worker_returns_twice_after_its_lease_expired(tmp_path: Path) -> None:
    """A takes, expires; B takes; A is refused and counted, B accepted, B's repetition acknowledged."""
    with Rig(folder=tmp_path) as rig:
        first = rig.leases(1, worker="a")[0]
        rig.advance(11)
        second = rig.leases(1, worker="b")[0]
        assert (second.group, second.index) == (first.group, first.index)
        with pytest.raises(Fenced, match="attempt 2 exists"):
            rig.submit(first, 0.25, worker="a")
        assert not rig.submit(second, 0.75, worker="b").duplicate
        assert rig.submit(second, 0.75, worker="b").duplicate
        assert counter(rig, "fenced") == 1
        assert rig.db.one("SELECT score FROM episodes WHERE group_id = 1 AND idx = 0") == (0.75,)


def test_f89_attempts_are_unique_over_a_restart_of_the_service(tmp_path: Path) -> None:
    with Rig(folder=tmp_path) as rig:
        first = rig.leases(1, worker="a")[0]
        rig.advance(11)
        rig.restart()
        second = rig.leases(1, worker="b")[0]
        assert second.attempt == 2
        with pytest.raises(Fenced):
            rig.submit(first, worker="a")
        assert not rig.submit(second, worker="b").duplicate


@pytest.mark.parametrize(("group", "idx", "attempt"), [(99, 0, 1), (1, 7, 1), (1, 0, 2), (1, 0, 0), (1, 0, -1)])
def test_a_lease_that_was_never_given_is_unknown(group: int, idx: int, attempt: int) -> None:
    with Rig() as rig:
        lease = rig.leases(1)[0]
        forged = msgspec.structs.replace(lease, group=group, index=idx, attempt=attempt)
        with pytest.raises(UnknownLease, match="never given"):
            rig.submit(forged)


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        (FailureKind.INFRA, 3),
        (FailureKind.ENV, 3),
        (FailureKind.GRADER, 3),
        (FailureKind.TIMEOUT, 3),
        (FailureKind.CANCELLED, 3),
        (FailureKind.WORKFLOW, 2),
    ],
)
def test_failures_are_tried_again_by_kind_then_given_up(kind: FailureKind, times: int) -> None:
    with Rig() as rig:
        for attempt in range(1, times + 1):
            lease = rig.leases(1)[0]
            assert (lease.group, lease.index, lease.attempt) == (1, 0, attempt)
            assert not rig.submit_failed(lease, kind).group_closed
        assert rig.db.one("SELECT state, kind FROM episodes WHERE idx = 0") == ("given_up", kind)
        rig.balanced()


def test_a_result_for_an_episode_that_was_given_up_is_closed_and_counted() -> None:
    with Rig(make_spec(limits=Limits(max_attempts=1))) as rig:
        lease = rig.leases(1)[0]
        rig.advance(11)
        with pytest.raises(Closed, match="had ended as given_up"):
            rig.submit(lease)
        assert counter(rig, "closed") == 1
        rig.balanced()


def test_a_repeated_failure_of_one_attempt_counts_once() -> None:
    with Rig() as rig:
        lease = rig.leases(1)[0]
        rig.submit_failed(lease)
        assert rig.submit_failed(lease).duplicate
        assert rig.db.one("SELECT failures FROM episodes WHERE idx = 0") == (1,)


def test_f60_every_way_out_of_a_lease_frees_it_exactly_once() -> None:
    """Error, cancel and timeout: nothing stays leased, and no capacity is gained either."""
    with Rig(make_spec(max_staleness=0, groups_per_batch=1)) as rig:
        a, b = rig.leases(2)
        rig.submit_failed(a, FailureKind.WORKFLOW)
        rig.submit_failed(b, FailureKind.CANCELLED)
        assert rig.submit_failed(b, FailureKind.CANCELLED).duplicate
        rig.leases(2)
        assert rig.lease(2).leases == ()
        rig.advance(11)
        again = rig.leases(2)
        assert rig.states("episodes") == {"leased": 2}
        for lease in again:
            rig.submit(lease, float(lease.index))
        rig.balanced()


def test_f65_no_two_siblings_or_attempts_share_a_seed() -> None:
    seeds = {episode_seed(s, g, i, a) for s in range(3) for g in range(20) for i in range(8) for a in range(1, 4)}
    assert len(seeds) == 3 * 20 * 8 * 3
    assert episode_seed(0, 1, 0, 1) == episode_seed(0, 1, 0, 1)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_f82_one_straggler_is_given_to_another_worker_and_status_names_it() -> None:
    with Rig(make_spec(group_size=8, groups_per_batch=1)) as rig:
        leases = rig.leases(8, worker="a")
        for lease in leases[:7]:
            rig.submit(lease, float(lease.index % 2), worker="a")
        epoch = rig.resume()
        rig.advance(4)
        why = rig.batch(epoch).why
        assert "0/1 groups kept, 1 open" in why
        assert "oldest episode 1/7 4 s on a (attempt 1)" in why
        rig.advance(6)
        straggler = rig.leases(1, worker="b")[0]
        assert (straggler.index, straggler.attempt) == (7, 2)
        rig.submit(straggler, 1.0, worker="b")
        assert rig.take(epoch).sequences == 8


def test_f90_partial_group_after_a_worker_crash() -> None:
    """Only the lost member is issued again; lost twice, the group is trained over the three that count."""
    with Rig(make_spec(group_size=4, groups_per_batch=1, limits=Limits(max_attempts=2))) as rig:
        leases = rig.leases(4)
        for lease, reward in zip(leases, (1.0, 0.0, None, 1.0), strict=True):
            if reward is not None:
                rig.submit(lease, reward)
        rig.advance(10)
        again = rig.leases(1, worker="b")[0]
        assert (again.index, again.attempt, again.task) == (2, 2, leases[2].task)
        assert again.seed != leases[2].seed
        rig.advance(10)
        assert rig.group(1)[0] == "kept"
        batch = rig.take(rig.resume())
        values = [run.value for row in batch.rows for run in row.advantages]
        assert values == pytest.approx([0.57735, -1.15470, 0.57735], abs=1e-4)
        rig.balanced()


def test_f81_two_of_four_make_a_group_by_the_partial_group_rule() -> None:
    """1 and 0, an error in user code (played twice) and a time limit: all four are accounted for, two are compared."""
    with Rig(make_spec(group_size=4, groups_per_batch=1)) as rig:
        epoch = rig.resume()
        failures = {1: FailureKind.WORKFLOW, 3: FailureKind.TIMEOUT}
        while leases := [each for each in rig.lease(4).leases if each.group == 1]:
            for each in leases:
                if each.index in failures:
                    rig.submit_failed(each, failures[each.index])
                else:
                    rig.submit(each, float(each.index == 0))
        ends = rig.db.all("SELECT state, kind, score FROM episodes WHERE group_id = 1 ORDER BY idx")
        assert ends == [
            ("done", None, 1.0),
            ("given_up", "workflow", None),
            ("done", None, 0.0),
            ("given_up", "timeout", None),
        ]
        assert rig.group(1) == ("kept", None)
        rows = {row.sample_id: row.advantages[0].value for row in rig.take(epoch).rows}
        assert rows == pytest.approx({"1/0/role_p/0": 0.5**0.5, "1/2/role_p/0": -(0.5**0.5)}, rel=1e-5)
        rig.balanced()


def test_f85_of_an_attempt_that_was_cut_off_no_token_is_counted_and_the_next_has_all_of_its_budget() -> None:
    """6 of 10 tokens, then its worker is gone: the next attempt samples its 10, and they alone are in the ledger,
    whenever the 6 arrive."""
    with Rig(make_spec(groups_per_batch=1)) as rig:
        epoch = rig.resume()
        first, other = rig.leases(2)
        rig.submit(other, 0.0)
        rig.advance(11)
        (again,) = rig.leases(1, worker="v")
        assert (again.id, again.attempt) == (f"{first.group}/{first.index}/2", 2)

        def said(length: int) -> Episode:
            whole = rig.episode(again, 1.0)
            cut = sample([rig.digest("p")], length=length)
            (trajectory,) = whole.trajectories
            turns = (msgspec.structs.replace(trajectory.turns[0], stop=2 + length),)
            return msgspec.structs.replace(
                whole, trajectories=(msgspec.structs.replace(trajectory, samples=(cut,), turns=turns),)
            )

        with pytest.raises(Fenced):
            rig.submit(first, episode=said(6))
        rig.submit(again, episode=said(10), worker="v")
        with pytest.raises(Fenced):
            rig.submit(first, episode=said(6))
        stored = rig.db.all("SELECT SUM(tokens), COUNT(*) FROM samples WHERE idx = ?", first.index)
        assert stored == [(10, 1)]
        (row,) = (row for row in rig.take(epoch).rows if row.sample_id.startswith(f"1/{first.index}/"))
        assert int(row.mask.sum()) == 10
        rig.balanced()


def test_f90_below_min_group_the_group_is_dropped_with_a_reason() -> None:
    with Rig(make_spec(group_size=4, limits=Limits(max_attempts=1))) as rig:
        leases = rig.leases(4)
        rig.submit(leases[0], 1.0)
        rig.advance(10)
        assert rig.group(1) == ("dropped", "too_few")
        rig.balanced()


def test_f91_a_second_live_process_of_one_name_is_refused() -> None:
    with Rig() as rig:
        rig.leases(1, worker="default")
        with pytest.raises(NameTaken, match="choose another name"):
            rig.lease(worker="default", incarnation="other")


def test_f91_a_restarted_worker_takes_over_and_its_old_leases_expire_at_once() -> None:
    with Rig() as rig:
        rig.leases(2, worker="x")
        rig.advance(4.5)
        assert len(rig.lease(2, worker="x", incarnation="x2").leases) == 2
        rows = rig.db.all("SELECT attempt FROM episodes WHERE state = 'leased'")
        assert rows == [(2,), (2,)]
        assert rig.db.one("SELECT COUNT(*) FROM components WHERE name = 'x'") == (1,)
        with pytest.raises(NameTaken):
            rig.renew(worker="x", incarnation="x")


def test_a_silent_worker_is_dead_and_its_leases_are_pending_before_their_term() -> None:
    limits = Limits(lease_ttl_s=60, dead_after_s=10)
    with Rig(make_spec(limits=limits)) as rig:
        rig.leases(2, worker="a")
        rig.advance(9)
        assert rig.states("episodes")["leased"] == 2
        rig.advance(1)
        assert rig.db.one("SELECT state FROM components WHERE name = 'a'") == ("dead",)
        assert rig.states("episodes") == {"pending": 2}


def test_a_dead_worker_that_calls_again_is_alive_and_hears_what_it_lost() -> None:
    with Rig() as rig:
        lease = rig.leases(1, worker="a")
        rig.advance(30)
        assert rig.renew(lease, worker="a").lost == (lease[0].id,)
        assert rig.db.one("SELECT state FROM components WHERE name = 'a'") == ("alive",)


def test_after_a_restart_every_live_lease_gets_a_full_new_term() -> None:
    with Rig() as rig:
        lease = rig.leases(1)
        rig.advance(9)
        rig.restart()
        rig.advance(9)
        assert rig.renew(lease).lost == ()
        assert rig.states("episodes")["leased"] == 1


def test_time_goes_on_where_it_stopped_and_never_back() -> None:
    with Rig() as rig:
        rig.leases(1)
        rig.advance(5)
        before = rig.go(rig.flow.status()).now_s
        rig.restart()
        assert rig.go(rig.flow.status()).now_s == pytest.approx(before)


def test_spans_must_name_published_weights() -> None:
    with Rig() as rig:
        lease = rig.leases(1)[0]
        for spans in ([(0, "wrong")], [(1, rig.digest("p")[1])]):
            with pytest.raises(UnknownVersion, match="no published weights"):
                rig.submit(lease, episode=rig.episode(lease, spans=spans))
        assert rig.states("episodes")["leased"] == 1


def test_an_episode_of_another_task_policy_or_role_is_refused_and_the_lease_lives() -> None:
    with Rig() as rig:
        lease = rig.leases(1)[0]
        good = rig.episode(lease)
        agent = good.trajectories[0]
        for bad, match in (
            (msgspec.structs.replace(good, task_key="else"), "is of task"),
            (msgspec.structs.replace(good, trajectories=(agent, agent)), "two agents"),
            (
                msgspec.structs.replace(good, trajectories=(msgspec.structs.replace(agent, policy="q"),)),
                "no policy 'q'",
            ),
            (
                msgspec.structs.replace(good, trajectories=(msgspec.structs.replace(agent, samples=()),)),
                "outside of its samples",
            ),
        ):
            with pytest.raises(BadRequest, match=match):
                rig.submit(lease, episode=bad)
        assert not rig.submit(lease, episode=good).duplicate


def test_truncated_is_done_and_graded() -> None:
    with Rig() as rig:
        lease = rig.leases(1)[0]
        rig.submit(lease, episode=msgspec.structs.replace(rig.episode(lease), outcome=Outcome.TRUNCATED))
        assert rig.db.one("SELECT state, outcome FROM episodes WHERE idx = 0") == ("done", "truncated")


def test_guarantee_no_episode_lost_big_payloads_go_to_files(tmp_path: Path) -> None:
    with Rig(folder=tmp_path, spec=make_spec(groups_per_batch=1)) as rig:
        for lease in rig.leases(2):
            big = sample([rig.digest("p")], length=200_000)
            episode = rig.episode(lease, float(lease.index))
            agent = msgspec.structs.replace(episode.trajectories[0], samples=(big,))
            rig.submit(lease, episode=msgspec.structs.replace(episode, trajectories=(agent,)))
        files = list((tmp_path / "payloads").iterdir())
        assert len(files) == 2
        assert rig.db.one("SELECT COUNT(*) FROM payloads WHERE body IS NULL AND file IS NOT NULL") == (2,)
        batch = rig.take(rig.resume())
        assert [len(row.tokens) for row in batch.rows] == [200_002, 200_002]


def test_nobody_but_its_holder_ends_a_lease() -> None:
    """A worker's token is every worker's: the name says whose episode it is."""
    with Rig() as rig:
        (lease,) = rig.leases(1, worker="a")
        failed = Episode(task_key=lease.task.key, outcome=Outcome.FAILED, failure=FailureKind.INFRA, error="not mine")
        with pytest.raises(UnknownLease, match="was given to 'a', not to 'stranger': only its holder ends it"):
            rig.submit(lease, episode=failed, worker="stranger")
        assert rig.states("episodes")["leased"] == 1
        assert not rig.submit(lease, worker="a").duplicate


def test_status_counts_what_each_worker_played() -> None:
    with Rig() as rig:
        for worker, count in (("a", 2), ("b", 1)):
            for lease in rig.leases(count, worker=worker):
                rig.submit(lease, worker=worker)
        found = {each.name: each.played for each in rig.go(rig.flow.status()).components if each.component == "rollout"}
        assert found == {"a": 2, "b": 1}


# ── weights that are too old ──


def ask(rig: Rig, held: int | None) -> m.LeaseReply:
    """Of a worker whose engine holds this version of p."""
    request = m.LeaseRequest(
        worker="w",
        incarnation="w",
        count=1,
        capabilities=m.Capabilities(policies=("p",)),
        versions={} if held is None else {"p": held},
    )
    return rig.go(rig.flow.lease(request))


def test_who_plays_with_weights_that_are_too_old_is_given_nothing_to_train() -> None:
    """Its work would be thrown away, and the others of its groups with it; while it catches up, others play."""
    with Rig(make_spec(steps=9, max_staleness=1, groups_per_batch=1)) as rig:
        epoch = rig.resume()
        for _ in range(2):
            rig.step(epoch)
        assert ask(rig, 0).leases, "two versions behind since a moment: the new weights come before it plays"
        rig.advance(2 * Limits().heartbeat_s)
        reply = ask(rig, 0)
        assert (reply.leases, reply.reason) == ((), WaitReason.TOO_OLD)
        assert reply.manifests["p"].version == 2, "it hears what to fetch"
        assert ask(rig, 1).leases, "one behind is within the bound"
        assert ask(rig, None).leases, "one that does not say is believed"


def test_weights_that_are_too_old_to_train_may_still_be_evaluated() -> None:
    evals = EvalSpec(tasks=tasks(2, name="held out"), count=2, every=1, at_start=False)
    spec = make_spec(steps=9, max_staleness=0, groups_per_batch=1, evals=evals)
    with Rig(spec) as rig:
        epoch = rig.resume()
        rig.step(epoch)
        rig.advance(10)
        (lease,) = ask(rig, 0).leases
        assert lease.task.dataset == "held out"
