"""Features of a task source by a model, into a file: the work of ``astraflow tasks features``."""

from __future__ import annotations

from pathlib import Path

from astraflow.disk import absent_if_raises, writing
from astraflow.errors import ConfigError
from astraflow.run.config import function_of
from astraflow.run.model_cache import require_model_folder
from astraflow.run.models import KNOWN, get
from astraflow.tasks.base import TaskSource
from astraflow.tasks.jsonl import JsonlTasks


def write_task_features(source: str, out: Path, *, field: str, model: str) -> tuple[int, int]:
    """How many tasks, and numbers of each. The file is complete or absent."""
    tasks = source_of(source)
    folder = get(model) if model in KNOWN else require_model_folder(Path(model).expanduser(), what="--model")
    if not out.parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent} for {out.name}: make it, or name another")
    # Here, so that what can be refused at once is refused before torch is loaded.
    from astraflow.backends.embedding import embedding_features
    from astraflow.backends.influence import save_features

    found = embedding_features(folder, tasks, field=field)
    partial = out.with_name(f".{out.name}.part")
    with writing(out, "name another file"), absent_if_raises(partial):
        save_features(found, partial)
        partial.replace(out)
    return len(found), len(next(iter(found.values())))


def source_of(reference: str) -> TaskSource:
    """Raises ConfigError for what is no task source."""
    if reference.endswith(".jsonl"):
        return JsonlTasks(reference)
    made = function_of(reference)()
    if not isinstance(made, TaskSource):
        raise ConfigError(f"{reference} made {type(made).__name__}, which is no task source; see tasks/base.py")
    return made
