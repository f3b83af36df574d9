"""Where every episode, group and sample of a run is; exit code 1 if that does not balance, or is not as events tell."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class Args:
    run: Positional[Path]
    """Run folder."""
    verify: bool = False
    """Tell every state again from the events that only grow, let the algorithms decide again, and compare with what is
    stored: one line a difference."""
    json: bool = False
    """One JSON object; its ``difference`` is 0 when everything adds up, with --verify its ``differences`` are none."""


def main(args: Args) -> int:
    from astraflow.run.layout import RunFolder
    from astraflow.run.ledger import ledger_lines, ledger_report, verification, verification_lines

    run = RunFolder(args.run).require()
    if args.verify:
        found = verification(run)
        print(json.dumps(found) if args.json else "\n".join(verification_lines(found)))
        return 0 if found["verified"] else 1
    report = ledger_report(run)
    print(json.dumps(report) if args.json else "\n".join(ledger_lines(report)))
    return 0 if report["difference"] == 0 else 1
