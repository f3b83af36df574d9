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
from astraflow.run.chaos.plan import make_plan
from astraflow.run.chaos.session import session
from astraflow.testing.sabotage import SWITCHES

DEFAULT = "examples/two_policies.py"
SMALL = (
    "policies.solver.groups_per_batch=4",
    "policies.verifier.groups_per_batch=4",
    "group_size=4",
    "rollout.slots=4",
    "eval.every=1000000",
    "limits.retain=checkpoint",
)
"""Small batches, so that there are many steps to be hit; and bytes that go while it happens."""
WRONG = (
    "lost",
    "trained_twice",
    "only_in_history",
    "ledger_difference",
    "not_recovered",
    "not_refused",
    "unexpected_deaths",
    "failed",
)
"""Figures that must be nothing: with any of them the command's exit code is 1."""


def main(
    *,
    kills: int = 100,
    seed: int = 0,
    recipe: str | None = None,
    set: Sequence[str] = (),
    run_dir: Path | None = None,
    without: str | None = None,
) -> dict[str, Any]:
    """``without``: a guarantee that is switched off (``astraflow.testing.sabotage``); the figures must show it."""
    folder = Path(tempfile.mkdtemp(prefix="astraflow-chaos-")) if run_dir is None else run_dir
    overrides = [*(SMALL if recipe is None else ()), *set]
    reference = recipe or _default()
    found = session(
        reference if without is None else _sabotaged(reference, without, folder),
        plan=make_plan(kills, seed),
        overrides=overrides,
        folder=folder,
        say=_say,
    )
    found = {"seed": seed, **found}
    if run_dir is None and not any(found[name] for name in WRONG):
        shutil.rmtree(folder)
    else:
        _say(f"the run folder is {folder / 'run'}")
    return found


def _sabotaged(recipe: str, without: str, folder: Path) -> str:
    """The same recipe file, with lines that switch the guarantee off in every process that imports it."""
    if without not in SWITCHES:
        raise ConfigError(f"--without takes one of {', '.join(SWITCHES)}, found {without!r}")
    if not Path(recipe).is_file():
        raise ConfigError(f"--without needs a recipe that is a file, found {recipe!r}")
    folder.mkdir(parents=True, exist_ok=True)
    changed = folder / f"without_{without}.py"
    lines = f"\n\nfrom astraflow.testing.sabotage import switch_off\n\nswitch_off({without!r})\n"
    changed.write_text(Path(recipe).read_text(encoding="utf-8") + lines, encoding="utf-8")
    return str(changed)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _default() -> str:
    """From the current folder, or beside the sources."""
    for root in (Path.cwd(), Path(astraflow.__file__).resolve().parents[2]):
        if (root / DEFAULT).is_file():
            return str(root / DEFAULT)
    raise ConfigError(f"there is no {DEFAULT} here: name a recipe by --recipe")
