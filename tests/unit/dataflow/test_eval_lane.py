"""The evaluation lane: it takes nothing from training, and its figures hide nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from astraflow.dataflow.settings import EvalSpec, Limits, PolicySpec
from astraflow.observe.metrics import Registry
from astraflow.observe.metrics_file import read_points
from astraflow.observe.status import status_lines
from astraflow.run.layout import RunFolder
from astraflow.run.recorder import Recorder
from astraflow.run.registry import fill_registry
from astraflow.types import Episode, Lease, Outcome, Purpose, Trajectory
from astraflow.wire import messages as m
from tests.unit.dataflow.rig import Rig, make_spec, manifest, tasks


def spec(*, count: int = 2, episodes: int = 1, every: int = 0, steps: int = 3, **more: object) -> object:
    evals = EvalSpec(tasks=tasks(5, name="held"), count=count, every=every, episodes=episodes)
    fields = {"limits": Limits(max_attempts=1), **more}
    return make_spec(steps=steps, evals=evals, **fields)  # type: ignore[arg-type]


def only(rig: Rig, purpose: Purpose, count: int = 64) -> list[Lease]:
    """What is leased of this purpose; the rest is handed back."""
    found = rig.lease(count).leases
    rest = tuple(lease.id for lease in found if lease.purpose is not purpose)
    rig.go(rig.flow.hand_back(m.HandBackRequest(worker="w", held=rest)))
    return [lease for lease in found if lease.purpose is purpose]


def play(rig: Rig, scores: dict[tuple[int, int], float | None]) -> m.EvalPoint:
    """Every evaluation episode, by (task, attempt); None is lost for good."""
    first: int | None = None
    while leases := only(rig, Purpose.EVAL):
        for lease in leases:
            first = lease.group if first is None else first
            score = scores[lease.group - first, lease.index]
            if score is None:
                rig.submit_failed(lease)
            else:
                at = lease.versions["p"]
                rig.submit(lease, episode=rig.episode(lease, score, spans=[(at, manifest("p", at).digest)]))
    return rig.go(rig.flow.status()).evals[-1]


def test_f107_pass_at_k_over_the_attempts_of_each_task() -> None:
    """Four attempts: one task with one right, one with none, one with all four (F107's numbers)."""
    rights = {0: 1, 1: 0, 2: 4}
    with Rig(spec(count=3, episodes=4)) as rig:  # type: ignore[arg-type]
        point = play(rig, {(task, n): float(n < right) for task, right in rights.items() for n in range(4)})
        assert point.pass_at == {
            "1": pytest.approx((0.25 + 0 + 1) / 3),
            "2": pytest.approx((0.5 + 0 + 1) / 3),
            "4": pytest.approx((1 + 0 + 1) / 3),
        }
        assert point.score == pytest.approx(point.pass_at["1"]), "pass@1 is the mean of 0 and 1"
        assert any("pass@1 0.417, pass@2 0.500, pass@4 0.667" in x for x in status_lines(rig.go(rig.flow.status())))
        registry = Registry()
        for _ in range(2):
            fill_registry(registry, rig.go(rig.flow.status()))
        assert "astraflow_eval_pass_at_4 0.66" in registry.prometheus()
        rig.restart()
        assert rig.go(rig.flow.status()).evals[-1] == point


def test_f107_lost_attempts_did_not_pass_and_stay_in_the_denominator() -> None:
    with Rig(spec(count=1, episodes=4)) as rig:  # type: ignore[arg-type]
        point = play(rig, {(0, 0): 1.0, (0, 1): None, (0, 2): None, (0, 3): 0.0})
        assert (point.score, point.coverage, point.episodes) == (0.25, 0.5, 4)
        assert point.pass_at == {"1": 0.25, "2": 0.5, "4": 1.0}


def test_f107_a_score_passes_from_the_setting_on() -> None:
    evals = EvalSpec(tasks=tasks(1, name="held"), count=1, every=0, episodes=2, passing=0.5)
    with Rig(make_spec(evals=evals)) as rig:
        assert play(rig, {(0, 0): 0.5, (0, 1): 0.49}).pass_at == {"1": 0.5, "2": 1.0}


def test_f107_pass_at_k_is_in_the_metrics_file(tmp_path: Path) -> None:
    with Rig(spec(count=1, episodes=2), folder=tmp_path) as rig:  # type: ignore[arg-type]
        play(rig, {(0, 0): 1.0, (0, 1): None})
        recorder = Recorder(RunFolder(tmp_path))
        recorder.look()
        recorder.close()
    (point,) = [point for point in read_points(tmp_path / "metrics.jsonl") if point.kind == "eval"]
    assert (point.x, point.metrics) == (
        0,
        {"score": 0.5, "coverage": 0.5, "episodes": 2.0, "pass@1": 0.5, "pass@2": 1.0},
    )


def test_one_attempt_a_task_has_no_pass_at_k() -> None:
    with Rig(spec(count=2)) as rig:  # type: ignore[arg-type]
        assert play(rig, {(0, 0): 1.0, (1, 0): 0.0}).pass_at == {}


def test_f107_sub_agents_trajectories_and_turns_are_no_episodes() -> None:
    """Five agents in one episode, each with turns: one episode, one score, one attempt."""

    def crowded(rig: Rig, lease: Lease, score: float) -> Episode:
        one = rig.episode(lease, score)
        (trajectory,) = one.trajectories
        turns = tuple(msgspec.structs.replace(trajectory.turns[0], index=n, reward=1.0) for n in range(3))
        agents = tuple(
            Trajectory(agent=f"{trajectory.role}#{n}", role=trajectory.role, policy="p",
                       samples=trajectory.samples, turns=turns)
            for n in range(5)
        )  # fmt: skip
        return msgspec.structs.replace(one, trajectories=agents)

    with Rig(spec(count=1, episodes=2)) as rig:  # type: ignore[arg-type]
        for lease, score in zip(only(rig, Purpose.EVAL), (0.0, 1.0), strict=True):
            rig.submit(lease, episode=crowded(rig, lease, score))
        (point,) = rig.go(rig.flow.status()).evals
        assert (point.episodes, point.score, point.coverage) == (2, 0.5, 1.0)
        assert point.pass_at == {"1": 0.5, "2": 1.0}
        assert rig.db.number("SELECT COUNT(*) FROM samples") == 0, "nothing of it is accounted as trainable"


def test_a_truncated_episode_is_graded_like_any_other() -> None:
    with Rig(spec(count=1, episodes=2)) as rig:  # type: ignore[arg-type]
        for lease in only(rig, Purpose.EVAL):
            cut = msgspec.structs.replace(rig.episode(lease, 1.0), outcome=Outcome.TRUNCATED)
            rig.submit(lease, episode=cut)
        assert rig.go(rig.flow.status()).evals[0].coverage == 1.0


# ── what it takes from training: its share, and nothing else ──


def test_an_evaluation_cancels_and_evicts_no_training_work() -> None:
    """It opens in the middle of training: every lease, group and kept group is where it was."""
    with Rig(spec(count=5, every=1, steps=9, max_staleness=2)) as rig:  # type: ignore[arg-type]
        play(rig, {(task, 0): 1.0 for task in range(5)})
        epoch = rig.resume()
        rig.play_groups(3)
        held = only(rig, Purpose.TRAIN, 4)
        batch = rig.take(epoch)
        before = rig.db.all("SELECT group_id, policy, state FROM group_policy WHERE state IN ('open', 'kept')")
        rig.commit(batch)
        assert rig.service.ledger.evals.open == 1
        rig.advance(1)
        after = rig.db.all("SELECT group_id, policy, state FROM group_policy WHERE state IN ('open', 'kept')")
        assert after == before
        assert rig.renew(held).lost == ()
        assert rig.db.number("SELECT COUNT(*) FROM group_policy WHERE reason = 'surplus'") == 0


@pytest.mark.parametrize(("slots", "most"), [(8, 2), (4, 1), (1, 1), (40, 5)])
def test_training_waits_for_no_more_than_the_share(slots: int, most: int) -> None:
    """A quarter of a worker's leases, at least one; also when it asks again and again."""
    with Rig(spec(count=5, episodes=1, max_staleness=30, steps=99)) as rig:  # type: ignore[arg-type]
        found: list[Lease] = []
        for _ in range(slots):
            found += rig.lease(1).leases
        assert sum(lease.purpose is Purpose.EVAL for lease in found) <= most


def test_the_share_lapses_where_no_training_waits() -> None:
    with Rig(spec(count=5, steps=0)) as rig:  # type: ignore[arg-type]
        assert len(only(rig, Purpose.EVAL, 5)) == 5


def test_every_policy_is_pinned_while_they_move_on() -> None:
    policies = {"p": PolicySpec(groups_per_batch=1), "judge": PolicySpec(trainable=False)}
    with Rig(spec(count=1, episodes=2, policies=policies)) as rig:  # type: ignore[arg-type]
        first, second = only(rig, Purpose.EVAL)
        assert first.versions == second.versions == {"p": 0, "judge": 0}
        epoch = rig.resume()
        rig.play_groups(1)
        rig.commit(rig.take(epoch))
        rig.submit_failed(first)
        rig.go(rig.flow.hand_back(m.HandBackRequest(worker="w", held=(second.id,))))
        (again,) = only(rig, Purpose.EVAL)
        assert (again.attempt, again.versions) == (2, {"p": 0, "judge": 0})
        assert ("p", 0) in {(each.policy, each.version) for each in rig.go(rig.service.live_manifests())}


def test_a_lost_evaluation_episode_is_tried_again_before_it_counts_as_wrong() -> None:
    with Rig(spec(count=1, limits=Limits(max_attempts=2))) as rig:  # type: ignore[arg-type]
        rig.submit_failed(only(rig, Purpose.EVAL)[0])
        rig.submit(only(rig, Purpose.EVAL)[0], 1.0)
        (point,) = rig.go(rig.flow.status()).evals
        assert (point.score, point.coverage) == (1.0, 1.0)


def test_nothing_of_an_evaluation_is_ever_trained() -> None:
    with Rig(spec(count=5, every=1, steps=2)) as rig:  # type: ignore[arg-type]
        epoch = rig.resume()
        while rig.service.ledger.state == "running":
            for lease in rig.lease(8).leases:
                at = lease.versions.get("p")
                spans = None if at is None else [(at, manifest("p", at).digest)]
                rig.submit(lease, episode=rig.episode(lease, float(lease.index), spans=spans))
            reply = rig.batch(epoch)
            if reply.batch is not None:
                rig.commit(reply.batch)
        assert (
            rig.db.all("SELECT 1 FROM batch_groups x JOIN groups g ON g.id = x.group_id WHERE g.purpose = 'eval'") == []
        )
        assert len(rig.go(rig.flow.status()).evals) == 3
        rig.balanced()
