"""Why a loss is flat or zero: what a run's ledger shows, what is normal in it and what is broken; then exit code 1."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class Args:
    run: Positional[Path]
    """Run folder, of a run that is going on or is over."""
    json: bool = False
    """One JSON object: the state of the run, and per policy its state, verdict and findings."""


def main(args: Args) -> int:
    from dataclasses import asdict

    from astraflow.observe.doctor import diagnose, diagnosis_lines
    from astraflow.observe.findings import State
    from astraflow.observe.terminal import harmless
    from astraflow.run.layout import RunFolder
    from astraflow.run.over import stored_state
    from astraflow.run.symptoms import symptoms_of

    run = RunFolder(args.run).require()
    found = [diagnose(each) for each in symptoms_of(run)]
    state, error = stored_state(run)
    if args.json:
        policies = [asdict(each) for each in found]
        print(json.dumps({"run": str(run.path), "state": state, "error": error, "policies": policies}))
    else:
        for diagnosis in found:
            print("\n".join(diagnosis_lines(diagnosis)))
        known = f"has steps to go; 'astraflow status {run.path}' tells who is at it" if state == "running" else state
        print(harmless(f"run {run.path}: {known}" + (f" ({error})" if error else "")))
    return 1 if any(each.state is State.BROKEN for each in found) else 0
