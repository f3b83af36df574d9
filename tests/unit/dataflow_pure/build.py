"""Episodes by hand: each reply is two prompt tokens and three sampled ones unless said otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from astraflow.algorithms.base import UnitTable
from astraflow.algorithms.credit import GroupMean
from astraflow.algorithms.curate import Shuffled
from astraflow.algorithms.pace import BoundedStaleness
from astraflow.algorithms.pipeline import Pipeline
from astraflow.algorithms.select import EarliestDeadline
from astraflow.dataflow.settle import Verdict, settle
from astraflow.tasks.lists import ListTasks
from astraflow.types import Episode, FailureKind, Outcome, Sample, SampleKind, Span, Task, Trajectory, Turn

TASK = Task(key="t", payload={"question": "6*7"})


def pipeline(**changes) -> Pipeline:
    parts = {
        "curate": Shuffled(ListTasks("t", [TASK]), group_size=4),
        "pace": BoundedStaleness(),
        "credit": GroupMean(),
        "keep": (),
        "select": EarliestDeadline(),
    }
    return Pipeline(**{**parts, **changes})


def sample(version: int | Sequence[int] = 0, *, prompt: int = 2, reply: int = 3) -> Sample:
    """One prompt and one reply per version: P A, or P A P B of versions (a, b)."""
    versions = [version] if isinstance(version, int) else list(version)
    length = len(versions) * (prompt + reply)
    sampled = np.zeros(length, np.bool_)
    spans = []
    for n, each in enumerate(versions):
        start = n * (prompt + reply) + prompt
        sampled[start : start + reply] = True
        if reply:
            spans.append(Span(start=start, stop=start + reply, version=each, digest=f"d{each}"))
    return Sample(
        tokens=np.arange(length, dtype=np.int32),
        sampled=sampled,
        logprobs=np.where(sampled, -0.5, 0).astype(np.float32),
        spans=tuple(spans),
    )


def supervised(*, targets: int = 3) -> Sample:
    sampled = np.array([False, False] + [True] * targets, np.bool_)
    return Sample(
        tokens=np.arange(len(sampled), dtype=np.int32),
        sampled=sampled,
        logprobs=np.zeros(len(sampled), np.float32),
        kind=SampleKind.SUPERVISED,
    )


def trajectory(
    *rewards: float | None,
    version: int | Sequence[int] = 0,
    role: str = "solver",
    agent: str | None = None,
    policy: str = "m0",
    reply: int = 3,
    keys: Sequence[str] = (),
) -> Trajectory:
    """One sample with one turn per reward."""
    versions = [version] * len(rewards) if isinstance(version, int) else list(version)
    turns = tuple(
        Turn(
            index=n,
            sample=0,
            start=n * (2 + reply) + 2,
            stop=(n + 1) * (2 + reply),
            reward=reward,
            baseline_key=keys[n] if keys else "",
        )
        for n, reward in enumerate(rewards)
    )
    samples = (sample(versions, reply=reply),)
    return Trajectory(agent=agent or role, role=role, policy=policy, samples=samples, turns=turns)


def episode(*trajectories: Trajectory, outcome: Outcome = Outcome.COMPLETED, **more) -> Episode:
    failure = FailureKind.ENV if outcome is Outcome.FAILED else None
    return Episode(task_key="t", outcome=outcome, failure=failure, trajectories=trajectories, **more)


def scored(reward: float | None, *, version: int = 0, outcome: Outcome = Outcome.COMPLETED) -> Episode:
    return episode(trajectory(reward, version=version), outcome=outcome)


def settled(
    episodes: Sequence[Episode | None],
    *,
    group: int = 7,
    min_group: int = 2,
    policies: dict[str, bool] | None = None,
    task: Task = TASK,
    **changes,
) -> dict[str, Verdict]:
    return settle(
        pipeline(**changes),
        group=group,
        task=task,
        size=len(episodes),
        episodes=episodes,
        arrival=1,
        policies=policies or {"m0": True},
        min_group=min_group,
    )


def table(
    rewards: Sequence[float | None], *, episodes: Sequence[int] | None = None, keys: Sequence[str] | None = None
) -> UnitTable:
    """A unit table by hand: one unit per reward."""
    count = len(rewards)
    values = np.array([np.nan if reward is None else reward for reward in rewards], np.float64)
    where = list(range(count)) if episodes is None else list(episodes)
    names = tuple(keys or ["solver"] * count)
    return UnitTable(
        episode=np.array(where, np.int64),
        role=names,
        turn=np.arange(count, dtype=np.int64),
        sample_id=tuple(f"0/{index}/{name}/0" for index, name in zip(where, names, strict=True)),
        reward=values,
        counts=~np.isnan(values),
        tokens=np.ones(count, np.int64),
        min_version=np.zeros(count, np.int64),
        outcome=(Outcome.COMPLETED,) * count,
        baseline_key=names,
    )
