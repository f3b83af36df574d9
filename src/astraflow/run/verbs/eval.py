"""Held-out score of a model folder on a recipe's evaluation tasks; trains nothing."""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class Args:
    recipe: Positional[str]
    """File, or package.module:function."""
    model: Path
    """Folder of the model, for example one that 'astraflow models export' made."""
    policy: str | None = None
    """Which policy the model plays; may be left out where the recipe trains one."""
    set: list[str] = field(default_factory=list)
    """path=value, any number."""
    seed: int | None = None
    json: bool = False
    """One JSON object."""


def main(args: Args) -> int:
    from astraflow.errors import ConfigError
    from astraflow.observe.status import pass_words
    from astraflow.run.choose_policy import choose_policy
    from astraflow.run.config import resolve
    from astraflow.run.first_cause import first_cause_only
    from astraflow.run.in_process import run_in_process
    from astraflow.run.model_cache import require_model_folder
    from astraflow.run.prepare import create_run

    folder = require_model_folder(args.model.expanduser().resolve(), what="--model")
    policy = choose_policy(resolve(args.recipe, args.set, args.seed).recipe, args.policy)
    changes = [*args.set, "steps=0", f"policies.{policy}.model={folder}"]
    resolved = resolve(args.recipe, changes, args.seed)
    if resolved.recipe.eval is None:
        raise ConfigError(f"{args.recipe} has no eval: there is nothing to score the model on")
    with tempfile.TemporaryDirectory(prefix="astraflow-eval-") as scratch:
        run = create_run(resolved, Path(scratch) / "run", instead="set TMPDIR to another folder")
        with first_cause_only():
            status = asyncio.run(run_in_process(run, resolved, watch=lambda _: None))
    point = status.evals[-1]
    found = {
        "model": str(folder),
        "dataset": point.dataset,
        "score": point.score,
        "coverage": point.coverage,
        "episodes": point.episodes,
        **{f"pass@{k}": value for k, value in point.pass_at.items()},
    }
    if args.json:
        print(json.dumps(found))
    else:
        graded = f"({point.coverage:.0%} graded){pass_words(point)}"
        print(f"{point.score:.3f} on {point.episodes} episodes of {point.dataset} {graded}")
    return 0
