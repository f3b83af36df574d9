"""Which tasks a run was started with: tasks.json in its folder, so that a changed dataset is refused with its rows.

The digest decides (config.json has it too); the rows only make the difference readable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astraflow.run.recipe import Recipe
from astraflow.tasks.base import TaskSource
from astraflow.tasks.digest import task_digest

MOST_ROWS = 10_000
"""Larger or unbounded sources are recorded by size and digest alone."""
SHOWN = 3
SOURCE = {"type", "name", "size", "digest"}
"""What ``config.to_plain`` makes of a task source."""


def record_tasks(recipe: Recipe) -> dict[str, Any]:
    """JSON: of each source of the recipe its name, size, digest and, where there are not too many, key → digest."""
    sources = {"tasks": recipe.tasks, **({} if recipe.eval is None else {"eval.tasks": recipe.eval.tasks})}
    return {where: _record(source) for where, source in sources.items()}


def _record(source: TaskSource) -> dict[str, Any]:
    found: dict[str, Any] = {"name": source.name, "size": source.size, "digest": source.digest()}
    if source.size is not None and source.size <= MOST_ROWS:
        tasks = (source.task(index) for index in range(source.size))
        found["rows"] = {task.key: task_digest(task).hex()[:16] for task in tasks}
    return found


def describe_changed_tasks(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """``tasks 'digits' (50 → 51): 1 new (7+7); 1 changed (1+2)`` for each source whose digest differs."""
    return "; ".join(
        _difference(where, old[where], new[where])
        for where in sorted(old.keys() & new.keys())
        if old[where]["digest"] != new[where]["digest"]
    )


def _difference(where: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    head = f"{where} {new['name']!r} ({_size(old)} → {_size(new)})"
    if "rows" not in old or "rows" not in new:
        return f"{head}: digest {old['digest'][:12]} → {new['digest'][:12]}"
    before, after = old["rows"], new["rows"]
    parts = {
        "gone": [key for key in before if key not in after],
        "new": [key for key in after if key not in before],
        "changed": [key for key in after if key in before and after[key] != before[key]],
    }
    words = [f"{len(keys)} {what} ({_some(keys)})" for what, keys in parts.items() if keys]
    return f"{head}: {', '.join(words) or 'the same tasks, in another order or form'}"


def _size(record: Mapping[str, Any]) -> str:
    return "unbounded" if record["size"] is None else str(record["size"])


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:SHOWN]) + (", …" if len(keys) > SHOWN else "")


def without_tasks(config: Any) -> Any:
    """The config with every task source taken out: equal where nothing but tasks has changed."""
    if isinstance(config, Mapping):
        if set(config) == SOURCE:
            return {"type": config["type"]}
        return {key: without_tasks(value) for key, value in config.items()}
    return [without_tasks(each) for each in config] if isinstance(config, list) else config


def changed_digests(old: Any, new: Any) -> dict[str, str]:
    """Digest then → digest now of every source, from two configs that are equal but for their tasks."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        if set(old) == SOURCE == set(new):
            return {} if old["digest"] == new["digest"] else {str(old["digest"]): str(new["digest"])}
        pairs = [(old[key], new[key]) for key in old.keys() & new.keys()]
    elif isinstance(old, list) and isinstance(new, list):
        pairs = list(zip(old, new, strict=False))
    else:
        return {}
    return {then: now for pair in pairs for then, now in changed_digests(*pair).items()}
