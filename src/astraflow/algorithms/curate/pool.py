"""What the learning ways of choosing share: a sized source with a place for every task, and what rewards mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from astraflow.algorithms.base import Admission, State
from astraflow.algorithms.checks import check_at_least, check_episodes, check_part
from astraflow.errors import ConfigError
from astraflow.tasks.base import TaskSource
from astraflow.tasks.order import permutation, uniform
from astraflow.types import Array, Task

SUPERVISED = "supervised"
"""Workflow of tasks that are played once: a group of one."""


def admission(task: Task, group_size: int) -> Admission:
    return Admission(task=task, episodes=1 if task.workflow == SUPERVISED else group_size)


class Pool:
    """The tasks of a sized source, each known by its place. Reads all of them once, when it is made."""

    def __init__(self, who: str, tasks: TaskSource, *, group_size: int, seed: int) -> None:
        check_part(f"{who}.tasks", tasks, TaskSource)
        check_episodes(f"{who}.group_size", group_size)
        check_at_least(f"{who}.seed", seed, 0)
        if tasks.size is None:
            raise ConfigError(f"{who} needs a task source of a known size, {tasks.name!r} is unbounded: no task of it "
                              "comes twice, so that nothing can be learnt of one")  # fmt: skip
        if tasks.size == 0:
            raise ConfigError(f"task source {tasks.name!r} has no tasks")
        self._tasks = tasks
        self._size = tasks.size
        self._group_size = group_size
        self._seed = seed
        self._places = {_identity(tasks.task(place)): place for place in range(tasks.size)}
        if len(self._places) != tasks.size:
            raise ConfigError(
                f"{who}: {tasks.size - len(self._places)} tasks of {tasks.name!r} have the key of another"
            )
        self._order: tuple[int, Array] | None = None
        self._unit: Array | None = None

    # Like a task source, so that a run's config shows it by its digest.

    @property
    def name(self) -> str:
        return self._tasks.name

    @property
    def size(self) -> int:
        return self._size

    def digest(self) -> str:
        return self._tasks.digest()

    def admit(self, place: int) -> Admission:
        return admission(self._tasks.task(place), self._group_size)

    def place(self, task: Task) -> int | None:
        """None: it is not of this source."""
        return self._places.get(_identity(task))

    def walk(self, position: int) -> int:
        """The place that comes at this position, every one once an epoch, in an order of (seed, epoch)."""
        epoch, at = divmod(position, self._size)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, permutation(self._size, seed=(self._seed, epoch)))
        return int(self._order[1][at])

    def chance(self, *what: int) -> float:
        """The number in [0, 1) that belongs to the seed and ``what``; never one that orders an epoch."""
        return uniform(seed=(self._seed, *what, 1))

    def embed(self, who: str, feature: str) -> None:
        """Hold every task's feature. Raises ConfigError naming the task that lacks it, or has one of another shape."""
        rows = features_of(who, self._tasks, feature, self._size).reshape(self._size, -1)
        self._unit = unit(rows)

    def cosines(self, places: list[int]) -> Array:
        """float64 [N, K]: of every task's feature with those of K places."""
        assert self._unit is not None, "embed first"
        return np.asarray(self._unit @ self._unit[places].T)

    # ── state ──

    def state(self, position: int, learned: State) -> State:
        return {"position": position, "seed": self._seed, "tasks": self.digest(), "learned": learned}

    def learned(self, state: Mapping[str, Any]) -> State:
        """Empty: nothing yet, or the tasks were changed on purpose. Raises ConfigError for another source or seed."""
        require_same(self.name, {"tasks": self.digest(), "seed": self._seed}, state)
        return dict(state["learned"])


def _identity(task: Task) -> tuple[str, str]:
    return task.dataset, task.key


def unit(vectors: Array) -> Array:
    """Of length 1 along the last axis; a vector of zeros stays one: it points nowhere."""
    largest = np.abs(vectors).max(axis=-1, keepdims=True, initial=0.0)
    scaled = vectors / np.where(largest > 0, largest, 1.0)
    length = np.linalg.norm(scaled, axis=-1, keepdims=True)
    return np.asarray(scaled / np.where(length > 0, length, 1.0))


def features_of(who: str, tasks: TaskSource, name: str, count: int) -> Array:
    rows: list[Array] = []
    for place in range(count):
        task = tasks.task(place)
        row = task.features.get(name)
        where = f"{who}: task {task.key!r} of {tasks.name!r}"
        if row is None:
            known = ", ".join(sorted(task.features)) or "none"
            raise ConfigError(f"{where} has no feature {name!r} (it has: {known}); see astraflow.tasks.features")
        if rows and row.shape != rows[0].shape:
            raise ConfigError(f"{where}: feature {name!r} has shape {list(row.shape)}, others {list(rows[0].shape)}")
        if not np.isfinite(row).all():
            raise ConfigError(f"{where}: feature {name!r} holds what is not finite")
        rows.append(np.asarray(row, np.float64))
    return np.stack(rows)


def require_same(source: str, mine: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raises ConfigError when the tasks or the seed are not those of the state."""
    for name, value in mine.items():
        if state[name] != value:
            raise ConfigError(
                f"cannot go on with {source!r}: its {name} changed from {state[name]} to {value}; "
                "restore it or start a new run"
            )


def draw(weights: Array, point: float) -> int:
    """Index with probability ∝ its weight; ``point`` in [0, 1). All weights 0: every index alike."""
    total = float(weights.sum())
    if not total > 0:
        return min(int(point * len(weights)), len(weights) - 1)
    last = int(np.flatnonzero(weights)[-1])
    return min(int(np.searchsorted(np.cumsum(weights), point * total, side="right")), last)


def sparse(values: Mapping[int, float], dtype: Any) -> State:
    """Place → value as two arrays, in the order of the mapping."""
    return {"at": np.array(list(values), np.int64), "value": np.array(list(values.values()), dtype)}


def unsparse(state: State) -> dict[int, Any]:
    return dict(zip(state["at"].tolist(), state["value"].tolist(), strict=True))
