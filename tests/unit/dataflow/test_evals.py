"""Evaluation: pinned, never trained, complete, in its own lane."""

from __future__ import annotations

import pytest

from astraflow.dataflow.settings import EvalSpec, Limits
from astraflow.types import Purpose
from tests.unit.dataflow.rig import Rig, make_spec, manifest, tasks


def spec(*, every: int = 2, count: int = 2, steps: int = 3, **more: object) -> object:
    evals = EvalSpec(tasks=tasks(5, name="held"), count=count, every=every, **more)  # type: ignore[arg-type]
    return make_spec(steps=steps, evals=evals, limits=Limits(max_attempts=1))


def play_evals(rig: Rig, score: float = 1.0) -> int:
    """Everything that waits in the lane."""
    played = 0
    while (lease := rig.lease(1).leases) and lease[0].purpose is Purpose.EVAL:
        at = lease[0].versions["p"]
        digest = manifest("p", at).digest
        rig.submit(lease[0], episode=rig.episode(lease[0], score, spans=[(at, digest)]))
        played += 1
    if lease:
        rig.submit_failed(lease[0])
    return played


def test_evaluations_at_the_start_every_k_and_at_the_end() -> None:
    with Rig(spec()) as rig:  # type: ignore[arg-type]
        assert play_evals(rig) == 2
        epoch = rig.resume()
        while not rig.batch(epoch).finished:
            for lease in rig.lease(4).leases:
                pin = lease.versions.get("p")
                episode = (
                    rig.episode(lease, float(lease.index))
                    if pin is None
                    else rig.episode(lease, 0.5, spans=[(pin, manifest("p", pin).digest)])
                )
                rig.submit(lease, episode=episode)
            reply = rig.batch(epoch)
            if reply.batch is not None:
                rig.commit(reply.batch)
        assert rig.service.ledger.state == "running", "the last evaluation is not done"
        play_evals(rig, 0.5)
        assert rig.service.ledger.state == "finished"
        points = rig.go(rig.flow.status()).evals
        assert [(p.version, p.score) for p in points] == [(0, 1.0), (2, 0.5), (3, 0.5)]
        assert points[1].digest == manifest("p", 2).digest
        rig.balanced()
        assert rig.db.number("SELECT COUNT(*) FROM group_policy p JOIN groups g ON g.id = p.group_id "
                             "WHERE g.purpose = 'eval'") == 0  # fmt: skip


def test_lost_and_failed_episodes_count_as_wrong_and_coverage_shows_it() -> None:
    with Rig(spec(count=4)) as rig:  # type: ignore[arg-type]
        leases = [rig.lease(1, worker=f"w{i}").leases[0] for i in range(4)]
        assert {lease.purpose for lease in leases} == {Purpose.EVAL}
        rig.submit(leases[0], 1.0)
        rig.submit(leases[1], 0.5)
        rig.submit_failed(leases[2])
        rig.advance(11)
        point = rig.go(rig.flow.status()).evals[0]
        assert (point.score, point.coverage, point.episodes) == (pytest.approx(1.5 / 4), 0.5, 4)


def test_leases_are_pinned_to_the_version_that_is_evaluated() -> None:
    with Rig(spec()) as rig:  # type: ignore[arg-type]
        lease = rig.lease(1).leases[0]
        assert lease.versions == {"p": 0}


def test_the_lane_takes_its_share_while_training_waits() -> None:
    with Rig(spec(count=5)) as rig:  # type: ignore[arg-type]
        purposes = [lease.purpose for lease in rig.lease(8).leases]
        assert purposes.count(Purpose.EVAL) == 2


def test_pinned_weights_stay_alive_until_their_evaluation_ended() -> None:
    with Rig(spec(every=0, steps=9)) as rig:  # type: ignore[arg-type]
        held = [lease for lease in rig.lease(8).leases if lease.purpose is Purpose.EVAL]
        epoch = rig.resume()
        for _ in range(4):
            for lease in rig.db.all("SELECT 1 WHERE 0"):
                assert lease
            rig.advance(0.1)
            for lease in rig.lease(4, worker="v").leases:
                if lease.purpose is Purpose.TRAIN:
                    rig.submit(lease, float(lease.index), worker="v")
            reply = rig.batch(epoch)
            if reply.batch:
                rig.commit(reply.batch)
            rig.renew(held)
        assert 0 in {m.version for m in rig.go(rig.service.live_manifests())}


def test_f71_points_are_by_version_whatever_order_they_end_in() -> None:
    with Rig(spec(every=1, at_start=False, count=1, steps=5)) as rig:  # type: ignore[arg-type]
        epoch = rig.resume()
        waiting = []
        for _ in range(2):
            while (reply := rig.batch(epoch)).batch is None:
                for lease in rig.lease(4).leases:
                    if lease.purpose is Purpose.EVAL:
                        waiting.append(lease)
                    else:
                        rig.submit(lease, float(lease.index))
            rig.commit(reply.batch)
        waiting += [x for x in rig.lease(8).leases if x.purpose is Purpose.EVAL]
        assert [x.versions["p"] for x in waiting] == [1, 2]
        for lease, score in zip(reversed(waiting), (0.6, 0.8), strict=True):
            at = lease.versions["p"]
            rig.submit(lease, episode=rig.episode(lease, score, spans=[(at, manifest("p", at).digest)]))
        points = rig.go(rig.flow.status()).evals
        assert [(p.version, p.score, p.digest) for p in points] == [
            (1, 0.8, manifest("p", 1).digest),
            (2, 0.6, manifest("p", 2).digest),
        ]


def test_a_run_without_steps_is_an_evaluation_and_ends() -> None:
    with Rig(spec(steps=0)) as rig:  # type: ignore[arg-type]
        assert rig.service.ledger.state == "running"
        for lease in rig.lease(8).leases:
            rig.submit(lease, 0.5)
        assert rig.service.ledger.state == "finished"
        assert rig.lease(1).finished
