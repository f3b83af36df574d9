"""Tasks that are already in memory."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from astraflow.errors import ConfigError
from astraflow.tasks.digest import combined, tasks_digest
from astraflow.types import Task


class ListTasks:
    """A sized source over a list; every task takes the source's name as its ``dataset``."""

    def __init__(self, name: str, tasks: Sequence[Task]) -> None:
        if not tasks:
            raise ConfigError(f"task source {name!r} has no tasks")
        self._name = name
        self._tasks = tuple(msgspec.structs.replace(task, dataset=name) for task in tasks)
        require_unique([task.key for task in self._tasks], what=f"task source {name!r}")
        self._digest = combined("list", name, tasks_digest(self._tasks))

    @property
    def name(self) -> str:
        return self._name

    @property
    def size(self) -> int:
        return len(self._tasks)

    def task(self, index: int) -> Task:
        return self._tasks[in_range(index, self.size, self._name)]

    def digest(self) -> str:
        return self._digest


def require_unique(keys: Sequence[str], *, what: str, first: int = 0) -> None:
    """Raises ConfigError naming both places (counted from ``first``) when a key comes twice."""
    seen: dict[str, int] = {}
    for index, key in enumerate(keys):
        before = seen.setdefault(key, index)
        if before != index:
            raise ConfigError(
                f"{what}: key {key!r} of row {index + first} is also that of row {before + first}; make keys unique"
            )


def in_range(index: int, size: int, name: str) -> int:
    if not 0 <= index < size:
        raise IndexError(f"task source {name!r} has tasks 0 to {size - 1}, asked for {index}")
    return index
