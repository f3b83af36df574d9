"""Tasks made by a function of their index: an unbounded supply, or a sized one."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from astraflow.errors import ConfigError
from astraflow.tasks.digest import combined, tasks_digest
from astraflow.tasks.lists import in_range
from astraflow.types import Task

PROBES = 8
"""So many first tasks go into the digest: a changed generator is then noticed at a resume."""


class GeneratedTasks:
    """``make(index)`` must give the same task for ever for the same index, and take any index from 0 below ``size``.

    Use the index as a seed: ``random.Random(f"numbers/{index}")``. An unbounded source may be asked for indices beyond
    2**40 (``held_out`` does so). Raises ConfigError when two calls of one index differ.
    """

    def __init__(self, name: str, make: Callable[[int], Task], *, size: int | None = None) -> None:
        if size is not None and size < 1:
            raise ConfigError(f"task source {name!r}: size must be at least 1 or None (unbounded), found {size}")
        self._name = name
        self._make = make
        self._size = size
        count = PROBES if size is None else min(PROBES, size)
        first, again = (tasks_digest(self.task(index) for index in range(count)) for _ in range(2))
        if first != again:
            raise ConfigError(
                f"task source {name!r}: make(index) gave two different tasks for one index; seed it by it"
            )
        self._digest = combined("generated", name, size, first)

    @property
    def name(self) -> str:
        return self._name

    @property
    def size(self) -> int | None:
        return self._size

    def task(self, index: int) -> Task:
        if self._size is not None:
            in_range(index, self._size, self._name)
        elif index < 0:
            raise IndexError(f"task source {self._name!r} has no task {index}")
        task = self._make(index)
        if not isinstance(task, Task):
            raise ConfigError(
                f"task source {self._name!r}: make({index}) must give a Task, found {type(task).__name__}"
            )
        return msgspec.structs.replace(task, dataset=self._name)

    def digest(self) -> str:
        return self._digest
