"""A rollout service alone: pulls leases from --dataflow; the token is taken from ASTRAFLOW_TOKEN."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class Args:
    dataflow: str
    """URL of the run's dataflow."""
    recipe: Positional[str | None] = None
    """File, or package.module:function; left out, --run-dir has it."""
    run_dir: Path | None = None
    """Of a run on this machine."""
    set: list[str] = field(default_factory=list)
    """path=value, any number; as the run was started."""
    seed: int | None = None
    name: str | None = None
    """Unique in the run; made up if left out."""
    ca: Path | None = None
    """Certificate to trust beside the system's."""


def main(args: Args) -> int:
    from astraflow.run.child import hold_lifeline
    from astraflow.run.prepare import recipe_of
    from astraflow.run.serve_rollout import serve_rollout

    hold_lifeline()
    resolved = recipe_of(args.recipe, args.run_dir, args.set, args.seed)
    return asyncio.run(serve_rollout(resolved, url=args.dataflow, name=args.name, run_dir=args.run_dir, ca=args.ca))
