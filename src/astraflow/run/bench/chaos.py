"""Faults on a real run: processes killed, stopped, cut off, slowed; nothing may be lost or trained twice.

The figures are the run's own: recovery against that component's own cold start, what was trained against the trainers'
own record. The run folder is kept where something is wrong, or where ``--run-dir`` names a place.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import astraflow
from astraflow.errors import ConfigError
from astraflow.run.chaos.session import session

DEFAULT = "examples/tiny.py"
TINY = (
    "policies.main.groups_per_batch=4",
    "group_size=4",
    "rollout.slots=4",
    "policies.main.trainer.lr=1e-6",
    "eval.every=1000",
)
"""Small batches, so that there are many steps to be hit; and nothing that is learned to the end, so that there always
is signal."""
WRONG = ("lost", "trained_twice", "only_in_history", "ledger_difference", "not_recovered", "unexpected_deaths")


def main(
    *,
    kills: int = 100,
    seed: int = 0,
    recipe: str | None = None,
    set: Sequence[str] = (),
    run_dir: Path | None = None,
) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="astraflow-chaos-")) if run_dir is None else run_dir
    overrides = [*(TINY if recipe is None else ()), *set]
    found = session(
        recipe or _default(),
        kills=kills,
        seed=seed,
        overrides=overrides,
        folder=folder,
        say=_say,
    )
    if run_dir is None and not any(found[name] for name in WRONG):
        shutil.rmtree(folder)
    else:
        _say(f"the run folder is {folder / 'run'}")
    return found


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _default() -> str:
    """From the current folder, or beside the sources."""
    for root in (Path.cwd(), Path(astraflow.__file__).resolve().parents[2]):
        if (root / DEFAULT).is_file():
            return str(root / DEFAULT)
    raise ConfigError(f"there is no {DEFAULT} here: name a recipe by --recipe")
