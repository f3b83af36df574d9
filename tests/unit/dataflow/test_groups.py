"""Groups: verdicts, surplus, several policies, supervised tasks, starvation."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from astraflow.algorithms.keep import DropZeroVariance
from astraflow.dataflow.settings import EvalSpec, Limits, PolicySpec, RunSpec
from astraflow.errors import ConfigError, RunFailed, Starved
from astraflow.observe.waits import WaitReason
from tests.unit.dataflow.rig import Rig, make_spec, pipeline, supervised_episode, tasks


def test_zero_variance_is_dropped_with_its_reason_and_samples() -> None:
    with Rig(make_spec(keep=[DropZeroVariance()])) as rig:
        for lease in rig.leases(2):
            rig.submit(lease, 1.0)
        assert rig.group(1) == ("dropped", "zero_variance")
        assert rig.states("samples") == {"dropped": 2}
        rig.balanced()


def test_groups_that_are_never_kept_starve_the_run_with_the_counts() -> None:
    """The policy has learned the task: no batch could ever fill."""
    spec = make_spec(keep=[DropZeroVariance()], limits=Limits(no_signal_limit=2, barren_groups=1), source=tasks(500))
    with Rig(spec) as rig:
        epoch = rig.resume()
        for _ in range(4):
            for lease in rig.leases(2):
                rig.submit(lease, 1.0)
        with pytest.raises(Starved, match=r"kept none of its last 4 groups \(zero_variance 4\) at version 0; every"):
            rig.batch(epoch)


def test_a_finite_dataset_that_is_used_up_starves_with_the_counts() -> None:
    from astraflow.algorithms.curate import Shuffled

    spec = make_spec(curate=Shuffled(tasks(3), group_size=2, epochs=1))
    with Rig(spec) as rig:
        epoch = rig.resume()
        rig.step(epoch)
        rig.play_groups(1)
        assert rig.lease().reason == WaitReason.NO_TASK
        rig.advance(1)
        with pytest.raises(Starved, match="1 kept groups of the 2 that a batch needs, and 2 steps to go"):
            rig.batch(epoch)


def test_no_worker_for_a_policy_starves_and_names_who_is_there() -> None:
    with Rig(make_spec(limits=Limits(starved_after_s=60))) as rig:
        epoch = rig.resume()
        rig.lease(1, policies=["other"], worker="b2")
        for _ in range(6):
            rig.advance(5)
            rig.renew(worker="b2")
        assert rig.service.ledger.state == "running"
        for _ in range(7):
            rig.advance(5)
            rig.renew(worker="b2")
        with pytest.raises(Starved, match=r"no worker served it for 60 s .* 0 workers serve it; b2 serves other only"):
            rig.batch(epoch)


def test_a_run_that_failed_goes_on_when_the_operator_says_so() -> None:
    from astraflow.wire.messages import OperatorRequest

    with Rig() as rig:
        epoch = rig.resume()
        rig.go(rig.flow.operate(OperatorRequest(action="stop", error="x")))
        rig.restart()
        assert rig.service.ledger.state == "failed"
        rig.go(rig.flow.operate(OperatorRequest(action="resume")))
        rig.step(epoch)


def two(**specs: PolicySpec) -> RunSpec:
    return make_spec(policies=specs, steps=4)


def test_two_policies_have_independent_versions_and_surplus_is_dropped_oldest_first() -> None:
    hungry = PolicySpec(max_staleness=1, groups_per_batch=4)
    modest = PolicySpec(max_staleness=0, groups_per_batch=1)
    with Rig(two(a=hungry, b=modest)) as rig:
        rig.play_groups(4)
        assert rig.group(4, "b") == ("kept", None)
        assert [rig.group(g, "b") for g in (1, 2, 3)] == [("dropped", "surplus")] * 3
        batch = rig.take(rig.resume("a"), "a")
        assert len(batch.rows) == 8
        rig.commit(batch)
        assert (rig.digest("a")[0], rig.digest("b")[0]) == (1, 0)
        rig.balanced()
        other = rig.take(rig.resume("b"), "b")
        assert {row.sample_id.split("/")[2] for row in other.rows} == {"role_b"}
        rig.commit(other)
        rig.balanced()


def test_a_policy_that_did_not_play_has_the_group_dropped_not_played() -> None:
    with Rig(two(a=PolicySpec(), b=PolicySpec())) as rig:
        from msgspec.structs import replace

        for lease in rig.leases(2):
            episode = rig.episode(lease, float(lease.index))
            only = tuple(t for t in episode.trajectories if t.policy == "a")
            rig.submit(lease, episode=replace(episode, trajectories=only))
        assert rig.group(1, "a") == ("kept", None)
        assert rig.group(1, "b") == ("dropped", "not_played")
        rig.balanced()


def test_frozen_policies_have_no_rows() -> None:
    with Rig(two(a=PolicySpec(), judge=PolicySpec(trainable=False))) as rig:
        rig.play_groups(1)
        assert rig.group(1, "judge") is None
        assert rig.db.all("SELECT DISTINCT policy FROM samples") == [("a",)]
        rig.balanced()


def test_supervised_tasks_are_groups_of_one_that_are_never_stale() -> None:
    spec = make_spec(source=tasks(50, workflow="supervised"), group_size=8, keep=[DropZeroVariance()], max_staleness=0)
    with Rig(spec) as rig:
        epoch = rig.resume()
        for step in range(2):
            for lease in rig.leases(2):
                assert lease.index == 0
                rig.submit(lease, episode=supervised_episode(lease))
            batch = rig.take(epoch)
            assert [run.value for row in batch.rows for run in row.advantages] == [1.0, 1.0]
            assert (batch.version, batch.tokens) == (step, 4)
            rig.commit(batch)
            rig.balanced()


def test_a_worker_without_an_engine_gets_supervised_tasks_only() -> None:
    from astraflow.wire.messages import Capabilities, LeaseRequest

    spec = make_spec(source=tasks(50, workflow="supervised"))
    with Rig(spec) as rig:
        none = Capabilities(policies=(), supervised=True)
        reply = rig.go(rig.flow.lease(LeaseRequest(worker="w", incarnation="w", count=2, capabilities=none)))
        assert len(reply.leases) == 2


@dataclass(frozen=True)
class Raises:
    def verdict(self, summary: object, advantages: object) -> str | None:
        raise ZeroDivisionError("a bug of the user")


def test_an_algorithm_that_raises_stops_the_run_with_the_group_and_loses_no_data() -> None:
    with Rig(make_spec(keep=[Raises()])) as rig:
        epoch = rig.resume()
        for lease in rig.leases(2):
            rig.submit(lease, float(lease.index))
        with pytest.raises(RunFailed, match=r"group 1.*ZeroDivisionError"):
            rig.batch(epoch)
        assert rig.states("episodes") == {"done": 2}
        assert rig.states("groups") == {"ready": 1}
        rig.balanced()


class Picks:
    def __init__(self, *answer: int) -> None:
        self.answer = list(answer)

    def pick(self, ready: object, *, need: int, oldest_open: int | None) -> list[int]:
        return self.answer


@pytest.mark.parametrize("answer", [(1,), (1, 1), (1, 99)])
def test_a_select_that_picks_what_it_may_not_stops_the_run(answer: tuple[int, ...]) -> None:
    with Rig(make_spec(select=Picks(*answer))) as rig:
        epoch = rig.resume()
        rig.play_groups(2)
        with pytest.raises(RunFailed, match="must answer 2 of the 2 ready groups"):
            rig.batch(epoch)


def test_a_ready_group_found_at_start_up_is_settled() -> None:
    with Rig() as rig:
        a, b = rig.leases(2)
        rig.submit(a, 0.0)
        rig.service._commits._last = lambda: None  # a program that died between the submission and the verdict
        rig.submit(b, 1.0)
        assert rig.group(1) == ("ready", None)
        rig.restart()
        rig.advance(0.1)
        rig.advance(0.1)
        assert rig.group(1) == ("kept", None)


def test_the_same_tasks_come_after_a_restart() -> None:
    """Algorithm state is written with the decision that changed it."""
    with Rig(make_spec(source=tasks(9))) as rig, Rig(make_spec(source=tasks(9))) as calm:
        rig.play_groups(2)
        calm.play_groups(2)
        rig.restart(make_spec(source=tasks(9)))
        again = [lease.task.key for lease in rig.leases(4)]
        assert again == [lease.task.key for lease in calm.leases(4)]


def test_resuming_with_other_tasks_is_refused() -> None:
    with Rig(make_spec(source=tasks(9))) as rig:
        rig.play_groups(1)
        with pytest.raises(ConfigError):
            rig.restart(make_spec(source=tasks(9, name="others")))


def test_settings_out_of_range_say_both_values() -> None:
    for make, match in (
        (lambda: PolicySpec(max_staleness=-1), "at least 0, found -1"),
        (lambda: PolicySpec(groups_per_batch=0), "at least 1, found 0"),
        (lambda: Limits(lease_ttl_s=0), r"in \(0, inf\) seconds, found 0"),
        (lambda: Limits(heartbeat_s=9), "one lost heartbeat"),
        (lambda: Limits(eval_share=0), r"in \(0, 1\], found 0"),
        (lambda: EvalSpec(tasks=tasks(3), count=4, every=1), "count is 4, but tasks has only 3"),
        (lambda: make_spec(roles={"x": "nobody"}), "unknown policy 'nobody'"),
        (lambda: make_spec(policies={"f": PolicySpec(trainable=False)}), "none of .* is trainable"),
        (lambda: RunSpec(run="r", steps=0, policies={}, roles={}, pipeline=pipeline()), "at least one policy"),
    ):
        with pytest.raises(ConfigError, match=match):
            make()


@pytest.mark.parametrize(("size", "least"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 3), (8, 4)])
def test_members_that_must_count(size: int, least: int) -> None:
    assert Limits().counted_members(size) == least
