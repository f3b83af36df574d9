"""The dataflow service alone, of RECIPE or of an existing run folder; workers and trainers join by its URL."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class Args:
    recipe: Positional[str | None] = None
    """File, or package.module:function; left out, --run-dir names an existing run."""
    run_dir: Path | None = None
    set: list[str] = field(default_factory=list)
    """path=value, any number."""
    seed: int | None = None
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free one."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    weights_mbit: float | None = None
    """Limit on weights that workers read here, together, in Mbit/s."""
    tensorboard: bool = False
    """Also write TensorBoard files."""


def main(args: Args) -> int:
    from astraflow.run.child import hold_lifeline
    from astraflow.run.first_cause import first_cause_only
    from astraflow.run.prepare import open_run
    from astraflow.run.serve_dataflow import serve_dataflow
    from astraflow.run.tls import server_context
    from astraflow.wire.listener import require_port
    from astraflow.wire.rate import rate_of_mbit

    hold_lifeline()
    require_port(args.host, args.port)  # before a folder is made for a run that could not begin
    run, resolved = open_run(args.recipe, args.run_dir, args.set, args.seed)
    context = server_context(args.tls_cert, args.tls_key)
    rate = rate_of_mbit(args.weights_mbit, "--weights-mbit")
    with first_cause_only():
        return asyncio.run(
            serve_dataflow(
                run, resolved, host=args.host, port=args.port, ssl=context, tensorboard=args.tensorboard, rate=rate
            )
        )
