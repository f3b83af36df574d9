"""Train on the tasks whose gradients point where those of held-out tasks do."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil

import numpy as np

from astraflow.algorithms.base import Admission, GroupSummary, State
from astraflow.algorithms.checks import check_part, is_number
from astraflow.algorithms.curate.pool import features_of, unit
from astraflow.algorithms.curate.shuffled import Shuffled
from astraflow.errors import ConfigError
from astraflow.tasks.base import TaskSource
from astraflow.tasks.digest import combined
from astraflow.types import Array, Task


class Less:
    """LESS (Xia et al. 2024, arXiv 2402.04333): the ``fraction`` of tasks of the largest influence, each once an epoch.

        influence(z) = max_j Σ_i rate_i · cos(mean gradient of held-out dataset j at checkpoint i, gradient of z)

    Gradients are random projections of a few thousand numbers (their inner products survive it), in the feature
    ``feature`` of both sources: [d], or [C, d] at C checkpoints. ``astraflow.backends.influence`` computes them for
    small models. Ties by place. Nothing is learnt while the run goes on.
    """

    def __init__(
        self,
        tasks: TaskSource,
        *,
        held_out: TaskSource,
        group_size: int,
        seed: int = 0,
        feature: str = "gradient",
        fraction: float = 0.05,
        rates: Sequence[float] | None = None,
        epochs: int | None = None,
    ) -> None:
        """``rates``: learning rate of each checkpoint; None: all alike. At least one task is chosen."""
        check_part("Less.tasks", tasks, TaskSource)
        check_part("Less.held_out", held_out, TaskSource)
        if not (is_number(fraction) and 0 < fraction <= 1):
            raise ConfigError(f"Less.fraction must be in (0, 1], found {fraction}")
        self._chosen = Influential(tasks, held_out, feature=feature, fraction=fraction, rates=rates)
        self._shuffled = Shuffled(self._chosen, group_size=group_size, seed=seed, epochs=epochs)

    @property
    def groups(self) -> int | None:
        return self._shuffled.groups

    @property
    def size(self) -> int:
        return self._chosen.size

    @property
    def influence(self) -> Array:
        """float64 [N], of every task of the source."""
        return self._chosen.influence

    def next(self) -> Admission | None:
        return self._shuffled.next()

    def observe(self, summary: GroupSummary) -> None:
        pass

    def state_dict(self) -> State:
        return self._shuffled.state_dict()

    def load_state_dict(self, state: State) -> None:
        self._shuffled.load_state_dict(state)


class Influential:
    """The chosen part of a source, the largest influence first."""

    def __init__(
        self, tasks: TaskSource, held_out: TaskSource, *, feature: str, fraction: float, rates: Sequence[float] | None
    ) -> None:
        self._tasks = tasks
        count, held = _size(tasks), _size(held_out)
        gradients = _stack(features_of("Less", tasks, feature, count))
        goals = _stack(features_of("Less", held_out, feature, held))
        if gradients.shape[1:] != goals.shape[1:]:
            raise ConfigError(
                f"Less: feature {feature!r} has shape {list(gradients.shape[1:])} in {tasks.name!r} and "
                f"{list(goals.shape[1:])} in {held_out.name!r}: checkpoints and projection must be the same"
            )
        weights = _rates(rates, gradients.shape[1])
        datasets = [held_out.task(place).dataset for place in range(held)]
        self.influence = influence(gradients, goals, datasets, weights)
        chosen = ceil(count * Fraction(str(fraction)))  # in exact decimals: 0.07 of 100 is 7 (F63)
        self._places = np.argsort(-self.influence, kind="stable")[:chosen].tolist()
        self._digest = combined("less", tasks.digest(), held_out.digest(), feature, fraction, weights.tolist())

    @property
    def name(self) -> str:
        return self._tasks.name

    @property
    def size(self) -> int:
        return len(self._places)

    def task(self, index: int) -> Task:
        if not 0 <= index < self.size:
            raise IndexError(f"Less chose {self.size} tasks of {self.name!r}, asked for number {index}")
        return self._tasks.task(self._places[index])

    def digest(self) -> str:
        return self._digest


def influence(gradients: Array, goals: Array, datasets: Sequence[str], rates: Array) -> Array:
    """float64 [N] of gradients [N, C, d], goals [M, C, d] with their datasets [M], rates [C]."""
    subtasks = sorted(set(datasets))
    means = np.stack([goals[[each == name for each in datasets]].mean(axis=0) for name in subtasks])  # [J, C, d]
    cosines = np.einsum("ncd,jcd->njc", unit(gradients), unit(means))
    return np.asarray((cosines * rates).sum(axis=2).max(axis=1))


def _size(source: TaskSource) -> int:
    if not source.size:
        what = "is unbounded" if source.size is None else "has no tasks"
        raise ConfigError(f"Less needs task sources of a known size, {source.name!r} {what}")
    return source.size


def _stack(features: Array) -> Array:
    """[N, C, d] of [N, d] or [N, C, d]"""
    if features.ndim not in (2, 3) or 0 in features.shape:
        raise ConfigError(f"Less: a gradient must be [d] or [C, d], found {list(features.shape[1:])}")
    return features[:, None, :] if features.ndim == 2 else features


def _rates(rates: Sequence[float] | None, checkpoints: int) -> Array:
    try:
        found = np.full(checkpoints, 1 / checkpoints) if rates is None else np.array(rates, np.float64)
    except (TypeError, ValueError):
        found = np.empty(0)
    if found.shape != (checkpoints,) or not (np.isfinite(found) & (found >= 0)).all() or not found.any():
        raise ConfigError(
            f"Less.rates must be {checkpoints} finite numbers of at least 0, one a checkpoint and not all 0, "
            f"found {rates!r}"
        )
    return found
