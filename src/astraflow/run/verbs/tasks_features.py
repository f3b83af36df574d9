"""A vector for each task by the hidden states of a model, for algorithms that compare tasks (Dots); once, before a run.

A recipe adds them by WithFeatures(tasks, "embedding", stored_features("OUT")) and Dots(feature="embedding").
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class Args:
    source: Positional[str]
    """FILE.jsonl, as JsonlTasks(FILE) reads it, or the function that makes the recipe's source: FILE.py:function,
    package.module:function."""
    out: Positional[Path]
    """Where to: a safetensors file, a tensor a task, named by its key."""
    field: str = "question"
    """Of a task's payload: its text."""
    model: str = "smollm2"
    """A known model, or a folder: best the one that the policy begins with."""


def main(args: Args) -> int:
    from astraflow.run.task_features import write_task_features

    count, size = write_task_features(args.source, args.out, field=args.field, model=args.model)
    print(f"{args.out}: {count} tasks, {size} numbers each")
    return 0
