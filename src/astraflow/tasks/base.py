"""Where work comes from."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from astraflow.types import Task


@runtime_checkable
class TaskSource(Protocol):
    """An ordered supply of tasks with random access, so that a position is one integer and resumes exactly."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int | None:
        """Number of tasks of one epoch; None: unbounded."""

    def task(self, index: int) -> Task:
        """Task ``index`` (from 0, below ``size``); the same index gives the same task for ever."""

    def digest(self) -> str:
        """Changes exactly when the tasks change: resuming on another dataset is refused."""
