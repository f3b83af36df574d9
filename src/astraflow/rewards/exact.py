"""The reply is the answer and nothing else."""

from __future__ import annotations

from astraflow.types import Task


class Exact:
    """1.0 if the reply, without white space around it, is ``payload[key]``; else 0.0."""

    def __init__(self, *, key: str = "answer") -> None:
        self._key = key

    def __call__(self, text: str, task: Task) -> float:
        return float(text.strip() == str(task.payload[self._key]).strip())
