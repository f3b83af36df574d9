"""Start and stop rollout workers as the run needs them, by the law of dataflow/autoscale.py (``Recipe.scaling``)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class Args:
    run: Positional[str]
    """Run folder, or with --start and --stop URL of its dataflow (the token is then taken from ASTRAFLOW_TOKEN)."""
    start: str | None = None
    """Command that starts a worker, with {name}, {url}, {run}; left out: processes on this machine."""
    stop: str | None = None
    """Command that stops it."""
    prefix: str = "auto"
    """Of the names of workers that are started here: auto-0, auto-1 and so on."""
    region: str = ""
    """Of workers on this machine."""
    poll_s: float = 5.0
    ca: Path | None = None
    """Certificate to trust beside the system's."""


def main(args: Args) -> int:
    from astraflow.observe.terminal import harmless
    from astraflow.run.first_cause import first_cause_only
    from astraflow.run.serve_autoscale import AutoscaleOptions, serve_autoscale

    options = AutoscaleOptions(
        start=args.start, stop=args.stop, prefix=args.prefix, region=args.region, poll_s=args.poll_s, ca=args.ca
    )
    with first_cause_only():
        return asyncio.run(serve_autoscale(args.run, options, say=lambda line: print(harmless(line), flush=True)))
