"""The trainer of one policy alone: pulls batches from --dataflow; its token is ASTRAFLOW_TOKEN, or of --run-dir."""

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
    policy: str | None = None
    """Which; may be left out where the recipe trains one."""
    run_dir: Path | None = None
    """Of a run on this machine; elsewhere a folder for checkpoints."""
    set: list[str] = field(default_factory=list)
    """path=value, any number; as the run was started."""
    seed: int | None = None
    ca: Path | None = None
    """Certificate to trust beside the system's."""


def main(args: Args) -> int:
    from astraflow.run.child import hold_lifeline
    from astraflow.run.prepare import recipe_of
    from astraflow.run.serve_trainer import serve_trainer
    from astraflow.wire.calls import Role
    from astraflow.wire.tokens import lend

    hold_lifeline()
    lend(args.run_dir, Role.TRAINER, args.policy)
    resolved = recipe_of(args.recipe, args.run_dir, args.set, args.seed)
    return asyncio.run(serve_trainer(resolved, url=args.dataflow, policy=args.policy, run_dir=args.run_dir, ca=args.ca))
