"""``run`` and ``resume`` from the first line to the last: estimate, live display, the run, what is left of it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass

from astraflow.errors import AstraFlowError, RunFailed
from astraflow.observe.progress import Progress
from astraflow.run.config import Resolved
from astraflow.run.estimate import estimate_line
from astraflow.run.finish import ending_lines, finish_run
from astraflow.run.first_cause import first_cause_only
from astraflow.run.layout import RunFolder
from astraflow.run.plan import plan_lines, plan_of
from astraflow.run.supervisor import Listen, Supervisor
from astraflow.run.watch import Watch


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    in_process: bool = False
    tensorboard: bool = False
    json: bool = False
    although_failed: bool = False
    """A run that failed goes on: whoever starts it again has mended the cause."""


def launch(
    run: RunFolder,
    resolved: Resolved,
    *,
    listen: Listen,
    options: LaunchOptions,
    supply: tuple[int, int] | None = None,
) -> int:
    """Exit code. ``supply``: as for ``plan_of``. Raises RunFailed with the first cause."""
    out = sys.stderr if options.json else sys.stdout
    began = time.monotonic()
    progress = Progress(out)
    for line in [*plan_lines(plan_of(resolved, supply)), estimate_line(resolved.recipe), f"run folder {run.path}", ""]:
        progress.say(line)
    try:
        with progress:
            _play(run, resolved, listen, options, progress)
    except KeyboardInterrupt:
        progress.say(f"stopped; 'astraflow resume {run.path}' goes on")
        return 130
    except AstraFlowError:
        progress.say(
            f"logs are in {run.logs}; mend the cause first, then 'astraflow resume {run.path}' goes on from the newest "
            "checkpoint; where the recipe or the workflow was changed for that, 'astraflow run' begins a new run"
        )
        raise
    ending = finish_run(run, resolved, wall_s=time.monotonic() - began)
    if options.json:
        sys.stdout.write(json.dumps(ending.summary) + "\n")
    for line in ending_lines(run, ending, resolved.recipe.trainable):
        progress.say(line)
    if ending.ledger["difference"]:
        raise RunFailed(f"the ledger of {run.path} is off by {ending.ledger['difference']}: please report this")
    return 0


def _play(run: RunFolder, resolved: Resolved, listen: Listen, options: LaunchOptions, progress: Progress) -> None:
    watch = Watch(run, resolved.recipe, progress)
    if options.in_process:
        from astraflow.run.in_process import run_in_process

        with first_cause_only():
            asyncio.run(
                run_in_process(
                    run,
                    resolved,
                    watch=watch.show,
                    tensorboard=options.tensorboard,
                    although_failed=options.although_failed,
                )
            )
        return
    supervisor = Supervisor(
        run,
        resolved,
        listen=listen,
        watch=watch.show,
        say=progress.say,
        tensorboard=options.tensorboard,
        although_failed=options.although_failed,
    )
    with first_cause_only():
        asyncio.run(supervisor.run())
