"""A run that has ended: ``resume`` says so and starts nothing."""

from __future__ import annotations

import json
import sys

from astraflow.run.config import Resolved
from astraflow.run.finish import finish_run
from astraflow.run.layout import RunFolder, read_json
from astraflow.run.run_db import open_run_db


def is_finished(run: RunFolder) -> bool:
    """Every step committed and every evaluation done, as the ledger says; false where there is none yet."""
    if not run.database.exists():
        return False
    with open_run_db(run.database) as db:
        row = db.connection.execute("SELECT value FROM meta WHERE key = 'state'").fetchone()
    return row is not None and row[0] == "finished"


def say_finished(run: RunFolder, resolved: Resolved, *, as_json: bool) -> int:
    """Exit code 0. Changes nothing; only a summary that a killed launcher never wrote is made up for."""
    if not run.summary.exists():
        finish_run(run, resolved, wall_s=None)
    summary = read_json(run.summary)
    out = sys.stderr if as_json else sys.stdout
    out.write(f"{run.path} has finished its {summary['steps']} steps: there is nothing to go on with\n")
    if as_json:
        sys.stdout.write(json.dumps(summary) + "\n")
    return 0
