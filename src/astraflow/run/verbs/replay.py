"""A run's recorded past under other algorithms: what they would have chosen, side by side with what happened.

Nothing is played or trained again. Exit code 1 where, without other algorithms, not every decision is as recorded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class Args:
    run: Positional[Path]
    """Run folder."""
    curate: str | None = None
    """Which task next: Greso, "Greso(p_easy=0.3)" or package.module:object."""
    keep: list[str] = field(default_factory=list)
    """Train on it: as often as there are Keeps, asked in this order; "none" keeps all."""
    select: str | None = None
    """Which groups now."""
    json: bool = False
    """One JSON object."""


def main(args: Args) -> int:
    from astraflow.run.layout import RunFolder
    from astraflow.run.replay.report import replay, report_lines

    found = replay(RunFolder(args.run).require(), curate=args.curate, keep=args.keep, select=args.select)
    print(json.dumps(found) if args.json else "\n".join(report_lines(found)))
    return 0 if found["own"]["same"] or found["changed"] is not None else 1
