"""Groups by hand: a task of a source and the rewards that it got."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from astraflow.algorithms.base import GroupSummary, UnitTable
from astraflow.tasks.lists import ListTasks
from astraflow.types import Outcome, Task


def source(count: int = 8, name: str = "rows", **more) -> ListTasks:
    return ListTasks(name, [Task(key=f"{name}{i}", **more) for i in range(count)])


def group(
    task: Task,
    rewards: Sequence[float | None],
    *,
    policy: str = "p",
    version: int = 0,
    keys: Sequence[str] | None = None,
    number: int = 0,
) -> GroupSummary:
    """One unit an episode; a reward of None: not scored."""
    count = len(rewards)
    reward = np.array([np.nan if each is None else each for each in rewards], np.float64)
    return GroupSummary(
        group=number,
        policy=policy,
        task=task,
        size=count,
        outcomes=(Outcome.COMPLETED,) * count,
        units=UnitTable(
            episode=np.arange(count),
            role=("solver",) * count,
            turn=np.zeros(count, np.int64),
            sample_id=tuple(f"{number}/{i}/solver/0" for i in range(count)),
            reward=reward,
            counts=~np.isnan(reward),
            tokens=np.full(count, 5),
            min_version=np.full(count, version),
            outcome=(Outcome.COMPLETED,) * count,
            baseline_key=tuple(keys or ("solver",) * count),
        ),
        min_version=version,
        arrival=number,
        version=version,
    )


def admitted(curate, count: int) -> list[str]:
    found = [curate.next() for _ in range(count)]
    return [admission.task.key for admission in found if admission is not None]
