"""Several ways of choosing as one: stage after stage, or mixed by weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from astraflow.algorithms.base import Admission, Curate, GroupSummary, State
from astraflow.algorithms.checks import check_above_zero, check_at_least, check_part, is_number
from astraflow.algorithms.curate.pool import require_same
from astraflow.errors import ConfigError
from astraflow.tasks.order import uniform


@runtime_checkable
class Bounded(Protocol):
    """A Curate that knows when it ends."""

    @property
    def groups(self) -> int | None:
        """How many it can give before it has no more tasks; None: as many as are wanted, or not known."""


@runtime_checkable
class Sized(Protocol):
    """A Curate that knows how many tasks it has."""

    @property
    def size(self) -> int | None:
        """Different tasks that it draws from; None: unbounded, or not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """So many groups from one Curate."""

    curate: Curate
    groups: int | None = None
    """None: until it has no more tasks."""

    def __post_init__(self) -> None:
        check_part("Stage.curate", self.curate, Curate)
        check_at_least("Stage.groups", self.groups, 0, orelse=" or None (until it has no more tasks)")


class Stages:
    """One after the other: first ``groups`` of supervised rows, then reinforcement. The last stage may be unbounded."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        if not isinstance(stages, Sequence) or not stages:
            raise ConfigError(f"Stages needs a list of at least one stage, found {stages!r}")
        for index, stage in enumerate(stages):
            check_part(f"Stages[{index}]", stage, Stage)
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

    @property
    def size(self) -> int | None:
        return _sum([tasks_of(stage.curate) for stage in self._stages])

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

    ``temperature`` T instead of weights: by the number of tasks of each part, n_i^(1/T) (Arivazhagan et al. 2019,
    arXiv 1907.05019): 1 is in proportion to the sizes, a large one gives every part the same share.
    The draws depend on the seed and on how many groups were admitted, on nothing else.
    """

    def __init__(
        self,
        parts: Sequence[Curate],
        *,
        weights: Sequence[float] | None = None,
        temperature: float | None = None,
        seed: int = 0,
    ) -> None:
        for index, part in enumerate(parts):
            check_part(f"Mixture.parts[{index}]", part, Curate)
        if (weights is None) == (temperature is None):
            raise ConfigError("Mixture needs either weights or temperature, and not both")
        if temperature is not None:
            weights = weights_by_size(parts, temperature)
        assert weights is not None
        if not parts or len(parts) != len(weights):
            raise ConfigError(f"Mixture needs one weight per part, found {len(parts)} parts, {len(weights)} weights")
        if not all(is_number(weight) and 0 < weight < float("inf") for weight in weights):
            raise ConfigError(f"Mixture.weights must be finite and above 0, found {list(weights)}")
        check_at_least("Mixture.seed", seed, 0)
        self._parts = tuple(parts)
        self._by_size = temperature is not None
        self._weights = tuple(float(weight) for weight in weights)
        self._seed = seed
        self._position = 0

    @property
    def groups(self) -> int | None:
        return _sum([most_groups(part) for part in self._parts])

    @property
    def size(self) -> int | None:
        return _sum([tasks_of(part) for part in self._parts])

    @property
    def weights(self) -> tuple[float, ...]:
        return self._weights

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
        parts = [part.state_dict() for part in self._parts]
        return {"position": self._position, "seed": self._seed, "parts": parts}

    def load_state_dict(self, state: State) -> None:
        """Raises ConfigError when the parts or the seed are not those of the state."""
        require_same("Mixture", {"seed": self._seed}, {"seed": self._seed, **state})  # older states do not say it
        _load_parts(self._parts, state["parts"], "Mixture")
        self._position = int(state["position"])

    def _draw(self, left: Sequence[int], attempt: int) -> int:
        point = uniform(seed=(self._seed, self._position, attempt)) * sum(self._weights[i] for i in left)
        for part in left:
            point -= self._weights[part]
            if point < 0:
                return part
        return left[-1]


def weights_by_size(parts: Sequence[Curate], temperature: float) -> list[float]:
    """n_i^(1/T), of the largest part 1. Raises ConfigError where a part does not know how many tasks it has."""
    check_above_zero("Mixture.temperature", temperature)
    sizes = [tasks_of(part) for part in parts]
    for index, size in enumerate(sizes):
        if size is None:
            raise ConfigError(
                f"Mixture.temperature needs to know how many tasks each part has; parts[{index}] "
                f"({type(parts[index]).__name__}) is unbounded or does not say: give weights instead"
            )
    known = [size for size in sizes if size is not None]
    # Relative to the largest, so that no power overflows; a share below the smallest float would never be drawn.
    return [max(math.exp((math.log(size) - math.log(max(known))) / temperature), 1e-300) for size in known]


def most_groups(curate: Curate) -> int | None:
    """How many groups it can give before it has no more tasks; None: as many as are wanted, or not known."""
    return curate.groups if isinstance(curate, Bounded) else None


def tasks_of(curate: Curate) -> int | None:
    """Different tasks that it draws from; None: unbounded, or not known."""
    return curate.size if isinstance(curate, Sized) else None


def _sum(bounds: Sequence[int | None]) -> int | None:
    known = [bound for bound in bounds if bound is not None]
    return sum(known) if len(known) == len(bounds) else None


def _load_parts(parts: Sequence[Curate], states: Sequence[State], what: str) -> None:
    if len(parts) != len(states):
        raise ConfigError(f"{what} has {len(parts)} parts, the state is of {len(states)}")
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
