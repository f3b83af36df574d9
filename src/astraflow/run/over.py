"""A run that has ended, by its steps or by an error: what the verbs say of it when nothing runs any more."""

from __future__ import annotations

import json
import sys
from typing import Any

from astraflow.dataflow.store import is_held
from astraflow.errors import ConfigError
from astraflow.observe.terminal import harmless
from astraflow.run.config import Resolved
from astraflow.run.finish import finish_run
from astraflow.run.layout import RunFolder, read_json
from astraflow.run.run_db import holds_nothing, open_run_db


def stored_state(run: RunFolder) -> tuple[str | None, str | None]:
    """``running``, ``finished`` or ``failed`` as the ledger has it, and a failed one's error. None: no ledger yet."""
    found = _meta(run)
    return found.get("state"), found.get("error")


def stored_name(run: RunFolder) -> str:
    """The run's name: the folder's when the run began, wherever the folder lies now."""
    try:
        return _meta(run).get("run", run.name)
    except ConfigError as error:
        if not holds_nothing(error):
            raise
        return run.name  # its process ended before there were tables: it begins now


def _meta(run: RunFolder) -> dict[str, str]:
    if not run.database.exists():
        return {}
    with open_run_db(run.database) as db:
        rows = db.connection.execute("SELECT key, value FROM meta WHERE key IN ('run', 'state', 'error')").fetchall()
    return {str(key): str(value) for key, value in rows}


def is_finished(run: RunFolder) -> bool:
    """Every step committed and every evaluation done; false where there is no ledger yet."""
    return stored_state(run)[0] == "finished"


def is_over(run: RunFolder) -> bool:
    """Whoever answers where its dataflow once listened may be another program that has the port now."""
    return stored_state(run)[0] in ("finished", "failed")


def over_words(run: RunFolder) -> str:
    """One sentence on a run whose dataflow does not answer."""
    if is_alive(run):
        return silent_words(run)
    state, error = stored_state(run)
    if state == "finished":
        return f"{run.path} has finished; 'astraflow ledger {run.path}' tells where everything went"
    goes_on = f"'astraflow resume {run.path}' goes on with it"
    if state == "failed":
        anew = "where the recipe or the workflow was changed for that, 'astraflow run' begins a new one"
        return f"{run.path} failed: {error}; mend the cause first, then {goes_on}; {anew}"
    if not run.endpoint.exists():
        return f"{run.path} runs with --in-process, where nobody can ask it, or is stopped; {goes_on}"
    return f"{run.path} is stopped: no dataflow answers; {goes_on}"


def is_alive(run: RunFolder) -> bool:
    """Whether its dataflow lives, and can be asked."""
    return run.endpoint.exists() and is_held(run.path)


def silent_words(run: RunFolder) -> str:
    return (
        f"the dataflow of {run.path} lives and does not answer: it is stopped (SIGSTOP), or the machine is too busy; "
        f"ask again, or look into {run.logs / 'dataflow.log'}"
    )


def say_over(run: RunFolder, *, as_json: bool) -> int:
    """Of a run that nobody serves now, what the ledger says. Exit code 0 if it has finished, else 1."""
    state, error = stored_state(run)
    words = over_words(run)
    told = {"run": str(run.path), "state": state, "error": error, "why": words}
    sys.stdout.write(f"{json.dumps(told) if as_json else harmless(words)}\n")
    return 0 if state == "finished" else 1


def _stored_summary(run: RunFolder) -> dict[str, Any]:
    """Empty where there is none that can be read: everything in it is in the ledger too."""
    try:
        found = read_json(run.summary)
    except ConfigError:
        return {}
    return found if isinstance(found.get("steps"), int) else {}


def say_finished(run: RunFolder, resolved: Resolved, *, as_json: bool) -> int:
    """Exit code 0. Changes nothing; only a summary that a killed launcher never wrote is made up for."""
    summary = _stored_summary(run)
    if not summary:
        finish_run(run, resolved, wall_s=None)
        summary = read_json(run.summary)
    out = sys.stderr if as_json else sys.stdout
    out.write(f"{run.path} has finished its {summary['steps']} steps: there is nothing to go on with\n")
    if as_json:
        sys.stdout.write(json.dumps(summary) + "\n")
    return 0
