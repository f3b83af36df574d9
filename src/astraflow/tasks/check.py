"""What must hold of every task source; also for sources that users write."""

from __future__ import annotations

from astraflow.errors import ConfigError
from astraflow.tasks.base import TaskSource
from astraflow.tasks.digest import task_digest
from astraflow.tasks.lists import require_unique

SAMPLE = 200


def check(source: TaskSource) -> int:
    """Number of tasks looked at: all of a sized source, the first 200 of an unbounded one.

    Raises ConfigError naming the rows when a key is empty or comes twice, or when an index gives two different tasks.
    """
    count = SAMPLE if source.size is None else source.size
    if count < 1:
        raise ConfigError(f"task source {source.name!r} has no tasks")
    tasks = [source.task(index) for index in range(count)]
    for index, task in enumerate(tasks):
        if not task.key:
            raise ConfigError(f"task source {source.name!r}: row {index} has an empty key")
    require_unique([task.key for task in tasks], what=f"task source {source.name!r}")
    for index in range(min(count, SAMPLE)):
        if task_digest(source.task(index)) != task_digest(tasks[index]):
            raise ConfigError(f"task source {source.name!r}: task {index} changes from call to call")
    return count
