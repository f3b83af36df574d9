"""Where every episode, group and sample of a run is; exit code 1 if that does not balance."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class Args:
    run: Positional[Path]
    """Run folder."""
    json: bool = False
    """One JSON object; its ``difference`` is 0 when everything adds up."""


def main(args: Args) -> int:
    from astraflow.run.layout import RunFolder
    from astraflow.run.ledger import ledger_lines, ledger_report

    report = ledger_report(RunFolder(args.run).require())
    print(json.dumps(report) if args.json else "\n".join(ledger_lines(report)))
    return 0 if report["difference"] == 0 else 1
