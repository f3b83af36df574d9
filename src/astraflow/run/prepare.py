"""Before anything starts: the recipe resolved, the run folder made or found, tokens and version 0 in it."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from astraflow.disk import writing
from astraflow.errors import ConfigError
from astraflow.run.config import Resolved, load_config, resolve
from astraflow.run.initial import publish_initial
from astraflow.run.layout import ANOTHER, RunFolder, new_run_folder, write_json
from astraflow.run.task_record import record_tasks
from astraflow.wire.tokens import Tokens

Say = Callable[[str], None]


def create_run(
    resolved: Resolved, run_dir: Path | None, *, say: Say = lambda _: None, instead: str = ANOTHER
) -> RunFolder:
    """A new run folder, complete: config.json is written last, so that a folder with it can be resumed.

    Whatever goes wrong, nothing is left that was not there before. ``instead``: what to do where it cannot be written.
    """
    root = Path(os.environ.get("ASTRAFLOW_RUNS", "runs"))
    run = RunFolder(run_dir) if run_dir is not None else new_run_folder(root, resolved.recipe.name)
    before = set(run.path.iterdir()) if run.path.is_dir() else None
    try:
        with writing(run.path, instead):
            run.create()
            Tokens.make(resolved.recipe.trainable).write(run.path)
            asyncio.run(publish_initial(run, resolved.recipe, say))
            write_json(run.tasks, record_tasks(resolved.recipe))
            write_json(run.config, resolved.as_file())
    except BaseException:
        _take_back(run.path, before)
        raise
    return run


def _take_back(folder: Path, before: set[Path] | None) -> None:
    """Of a run that could not be made, all that is there beside what was ``before``; None: there was no folder."""
    if before is None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in set(folder.iterdir()) - before:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def open_run(
    recipe: str | None, run_dir: Path | None, overrides: Sequence[str], seed: int | None
) -> tuple[RunFolder, Resolved]:
    """An existing run, or a new one of ``recipe``."""
    if run_dir is not None and RunFolder(run_dir).config.exists():
        if recipe is not None:
            raise ConfigError(f"{run_dir} already holds a run; leave the recipe out to go on with it")
        return RunFolder(run_dir), load_config(run_dir)
    if recipe is None:
        raise ConfigError("name a recipe, or an existing run by --run-dir")
    resolved = resolve(recipe, overrides, seed)
    return create_run(resolved, run_dir), resolved


def recipe_of(recipe: str | None, run_dir: Path | None, overrides: Sequence[str], seed: int | None) -> Resolved:
    """For a worker: the run folder of this machine, or the recipe by name."""
    if recipe is not None:
        return resolve(recipe, overrides, seed)
    if run_dir is None:
        raise ConfigError("name a recipe, or a run folder of this machine by --run-dir")
    return load_config(run_dir)
