"""Which task next, and how many episodes of it? A position is one integer, so a resume is exact (F67)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from astraflow.algorithms.base import Admission, Curate, GroupSummary, State
from astraflow.errors import ConfigError
from astraflow.tasks.base import TaskSource
from astraflow.tasks.order import permutation, uniform

SUPERVISED = "supervised"
"""Workflow of tasks that are played once: a group of one."""


class Shuffled:
    """Every task once per epoch, in an order that depends on (seed, epoch) alone; an unbounded source in its own order.

    ``epochs`` None: for ever. Tasks of the workflow ``supervised`` get one episode.
    """

    def __init__(self, tasks: TaskSource, *, group_size: int, seed: int = 0, epochs: int | None = None) -> None:
        if group_size < 1:
            raise ConfigError(f"Shuffled.group_size must be at least 1, found {group_size}")
        if seed < 0:
            raise ConfigError(f"Shuffled.seed must be at least 0, found {seed}")
        if epochs is not None and epochs < 1:
            raise ConfigError(f"Shuffled.epochs must be at least 1 or None (for ever), found {epochs}")
        if epochs is not None and tasks.size is None:
            raise ConfigError(f"Shuffled.epochs is {epochs}, but {tasks.name!r} is unbounded: it has no epochs")
        if tasks.size == 0:
            raise ConfigError(f"task source {tasks.name!r} has no tasks")
        self._tasks = tasks
        self._group_size = group_size
        self._seed = seed
        self._epochs = epochs
        self._position = 0
        self._order: tuple[int, list[int]] | None = None

    @property
    def groups(self) -> int | None:
        """All epochs; None: for ever."""
        return None if self._epochs is None or self._tasks.size is None else self._epochs * self._tasks.size

    def next(self) -> Admission | None:
        index = self._index(self._position)
        if index is None:
            return None
        self._position += 1
        task = self._tasks.task(index)
        return Admission(task=task, episodes=1 if task.workflow == SUPERVISED else self._group_size)

    def observe(self, summary: GroupSummary) -> None:
        pass

    def state_dict(self) -> State:
        return {"position": self._position, "seed": self._seed, "tasks": self._tasks.digest()}

    def load_state_dict(self, state: State) -> None:
        """Raises ConfigError when the tasks or the seed are not those of the state."""
        mine = self.state_dict()
        for name in ("tasks", "seed"):
            if state[name] != mine[name]:
                raise ConfigError(
                    f"cannot go on with {self._tasks.name!r}: its {name} changed from {state[name]} to {mine[name]}; "
                    "restore it or start a new run"
                )
        self._position = int(state["position"])

    def _index(self, position: int) -> int | None:
        size = self._tasks.size
        if size is None:
            return position
        epoch, place = divmod(position, size)
        if self._epochs is not None and epoch >= self._epochs:
            return None
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, permutation(size, seed=(self._seed, epoch)).tolist())
        return self._order[1][place]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """So many groups from one Curate."""

    curate: Curate
    groups: int | None = None
    """None: until it has no more tasks."""


class Stages:
    """One after the other: first ``groups`` of supervised rows, then reinforcement. The last stage may be unbounded."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        if not stages:
            raise ConfigError("Stages needs at least one stage")
        for index, stage in enumerate(stages):
            if stage.groups is not None and stage.groups < 0:
                raise ConfigError(f"Stages[{index}].groups must be at least 0 or None, found {stage.groups}")
        self._stages = tuple(stages)
        self._at = 0
        self._admitted = 0

    @property
    def groups(self) -> int | None:
        bounds = []
        for stage in self._stages:
            known = [bound for bound in (stage.groups, most_groups(stage.curate)) if bound is not None]
            bounds.append(min(known, default=None))
        return _sum(bounds)

    def next(self) -> Admission | None:
        while self._at < len(self._stages):
            stage = self._stages[self._at]
            admission = None
            if stage.groups is None or self._admitted < stage.groups:
                admission = stage.curate.next()
            if admission is not None:
                self._admitted += 1
                return admission
            if self._at == len(self._stages) - 1:
                return None
            self._at += 1
            self._admitted = 0
        return None

    def observe(self, summary: GroupSummary) -> None:
        for stage in self._stages:
            stage.curate.observe(summary)

    def state_dict(self) -> State:
        parts = [stage.curate.state_dict() for stage in self._stages]
        return {"at": self._at, "admitted": self._admitted, "parts": parts}

    def load_state_dict(self, state: State) -> None:
        _load_parts([stage.curate for stage in self._stages], state["parts"], "Stages")
        self._at = int(state["at"])
        self._admitted = int(state["admitted"])


class Mixture:
    """The next group comes from part i with probability ``weights[i] / sum(weights)``; a part without tasks is skipped.

    The draws depend on the seed and on how many groups were admitted, on nothing else.
    """

    def __init__(self, parts: Sequence[Curate], *, weights: Sequence[float], seed: int = 0) -> None:
        if not parts or len(parts) != len(weights):
            raise ConfigError(f"Mixture needs one weight per part, found {len(parts)} parts, {len(weights)} weights")
        if not all(0 < weight < float("inf") for weight in weights):
            raise ConfigError(f"Mixture.weights must be finite and above 0, found {list(weights)}")
        if seed < 0:
            raise ConfigError(f"Mixture.seed must be at least 0, found {seed}")
        self._parts = tuple(parts)
        self._weights = tuple(float(weight) for weight in weights)
        self._seed = seed
        self._position = 0

    @property
    def groups(self) -> int | None:
        return _sum([most_groups(part) for part in self._parts])

    def next(self) -> Admission | None:
        left = list(range(len(self._parts)))
        attempt = 0
        while left:
            chosen = self._draw(left, attempt)
            admission = self._parts[chosen].next()
            if admission is not None:
                self._position += 1
                return admission
            left.remove(chosen)
            attempt += 1
        return None

    def observe(self, summary: GroupSummary) -> None:
        for part in self._parts:
            part.observe(summary)

    def state_dict(self) -> State:
        return {"position": self._position, "parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state: State) -> None:
        _load_parts(self._parts, state["parts"], "Mixture")
        self._position = int(state["position"])

    def _draw(self, left: Sequence[int], attempt: int) -> int:
        point = uniform(seed=(self._seed, self._position, attempt)) * sum(self._weights[i] for i in left)
        for part in left:
            point -= self._weights[part]
            if point < 0:
                return part
        return left[-1]


def most_groups(curate: Curate) -> int | None:
    """How many groups it can give before it has no more tasks; None: as many as are wanted, or not known."""
    return curate.groups if isinstance(curate, Shuffled | Stages | Mixture) else None


def _sum(bounds: Sequence[int | None]) -> int | None:
    known = [bound for bound in bounds if bound is not None]
    return sum(known) if len(known) == len(bounds) else None


def _load_parts(parts: Sequence[Curate], states: Sequence[State], what: str) -> None:
    if len(parts) != len(states):
        raise ConfigError(f"{what} has {len(parts)} parts, the state is of {len(states)}")
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
