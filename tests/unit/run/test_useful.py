"""A quick death is one before any useful work, however long the process lived."""

from __future__ import annotations

import msgspec

from astraflow.run.useful import Useful
from astraflow.wire import messages as m
from astraflow.wire.calls import Role


def status(*, version: int = 0, done: int = 0, played: dict[str, float] | None = None) -> m.StatusReply:
    rollouts = tuple(
        m.ComponentStatus(
            component="rollout",
            name=name,
            state="alive",
            heard_s=0.0,
            report=m.ComponentReport(metrics={"episode/completed": count}),
        )
        for name, count in (played or {}).items()
    )
    policy = m.PolicyStatus(policy="main", trainable=True, version=version, steps=100)
    return m.StatusReply(
        run="r",
        state="running",
        error=None,
        now_s=0.0,
        policies=(policy,),
        components=rollouts,
        episodes={"done": done},
    )


def test_a_trainer_that_undoes_steps_is_useful_with_its_first_commit() -> None:
    useful = Useful(role=Role.TRAINER, name="main", policy="main")
    seen = []
    for version in (15, 15, 10, 10, 11):
        useful.see(status(version=version))
        seen.append(useful.done)
    assert seen == [False, False, False, False, True]


def test_a_rollout_service_is_useful_by_its_own_episodes_only() -> None:
    useful = Useful(role=Role.WORKER, name="rollout-0.2", policy=None)
    useful.see(status(played={"rollout-0": 40.0}))
    useful.see(status(played={"rollout-0": 80.0, "rollout-0.2": 0.0}))
    assert not useful.done
    useful.see(status(played={"rollout-0.2": 1.0}))
    assert useful.done


def test_what_dataflow_took_of_a_service_counts_before_its_next_heartbeat_says_so() -> None:
    """One that plays for seconds and then blocks for good never gets to tell."""
    useful = Useful(role=Role.WORKER, name="rollout-0", policy=None)
    silent = m.ComponentStatus(
        component="rollout", name="rollout-0", state="dead", heard_s=11.0, report=m.ComponentReport(), played=160
    )
    useful.see(msgspec.structs.replace(status(), components=(silent,)))
    assert useful.done


def test_dataflow_is_useful_once_it_has_stored_an_episode() -> None:
    useful = Useful(role=Role.OPERATOR, name="dataflow", policy=None)
    useful.see(status(done=100))
    useful.see(status(done=100, version=3))
    assert not useful.done
    useful.see(status(done=101))
    assert useful.done
