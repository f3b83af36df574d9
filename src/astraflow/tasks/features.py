"""Numbers that describe a task, for algorithms that compare tasks: added to a source, or hashed from its text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from astraflow.errors import ConfigError
from astraflow.tasks.base import TaskSource
from astraflow.tasks.digest import combined, tasks_digest
from astraflow.tasks.lists import in_range
from astraflow.types import Array, Task

PROBES = 8


class WithFeatures:
    """The tasks of a source with one feature more: ``WithFeatures(tasks, "embedding", text_features("question"))``.

    ``make(task)`` must give the same finite array for ever for the same task. Of an unbounded source too.
    """

    def __init__(self, source: TaskSource, feature: str, make: Callable[[Task], Array]) -> None:
        self._source = source
        self._feature = feature
        self._make = make
        count = PROBES if source.size is None else min(PROBES, source.size)
        first, again = (tasks_digest(self.task(index) for index in range(count)) for _ in range(2))
        if first != again:
            raise ConfigError(
                f"feature {feature!r} of {source.name!r}: make(task) gave two different answers for one task"
            )
        self._digest = combined("features", source.digest(), feature, first)

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def size(self) -> int | None:
        return self._source.size

    def task(self, index: int) -> Task:
        if self.size is not None:
            in_range(index, self.size, self.name)
        task = self._source.task(index)
        value = self._make(task)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
            raise ConfigError(
                f"feature {self._feature!r} of task {task.key!r} must be an array of numbers, found {value!r}"
            )
        if not np.isfinite(value).all():
            raise ConfigError(f"feature {self._feature!r} of task {task.key!r} holds what is not finite")
        return msgspec.structs.replace(task, features={**task.features, self._feature: value})

    def digest(self) -> str:
        return self._digest


def text_features(field: str, *, size: int = 256, grams: int = 3) -> Callable[[Task], Array]:
    """float32 [size] of a payload's text: counts of its character n-grams by hash, with a sign (feature hashing,
    Weinberger et al. 2009, arXiv 0902.2206), to length 1. Needs no model; texts that share words are similar."""
    if size < 1 or grams < 1:
        raise ConfigError(f"text_features: size and grams must be at least 1, found {size} and {grams}")

    def make(task: Task) -> Array:
        text = task.payload.get(field)
        if not isinstance(text, str):
            raise ConfigError(
                f"task {task.key!r} has no text in {field!r}; it has {', '.join(task.payload) or 'nothing'}"
            )
        return hashed(text, size=size, grams=grams)

    return make


def hashed(text: str, *, size: int, grams: int) -> Array:
    """See ``text_features``. An empty text is all zeros."""
    padded = f" {text.casefold()} "
    found = np.zeros(size, np.float64)
    for start in range(max(1, len(padded) - grams + 1)):
        digest = hashlib.blake2b(padded[start : start + grams].encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "big")
        found[(number >> 1) % size] += 1.0 if number & 1 else -1.0
    length = float(np.linalg.norm(found))
    return (found / length if text and length else np.zeros(size)).astype(np.float32)


def stored_features(path: Path | str) -> Callable[[Task], Array]:
    """Of a safetensors file with one tensor per task, named by its key: what ``astraflow.backends.influence`` writes.

    Raises ConfigError when there is none for a task.
    """
    path = Path(path)
    try:
        tensors: Mapping[str, Array] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read features from {path}: {error}") from error

    def make(task: Task) -> Array:
        if task.key not in tensors:
            raise ConfigError(f"{path} has no feature of task {task.key!r}; it has those of {len(tensors)} other tasks")
        return tensors[task.key]

    return make
