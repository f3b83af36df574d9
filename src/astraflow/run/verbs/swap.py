"""Let a frozen policy of a run that goes on play with a past version of another: an opponent from the past."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class Args:
    run: Positional[str]
    """Run folder, or URL of its dataflow (the token is then taken from ASTRAFLOW_TOKEN)."""
    policy: Positional[str]
    """A policy with trainable=False."""
    source: str
    """Whose version."""
    version: int
    """Which: the newest two, version 0 and what ``Policy.keep_every`` keeps are there."""
    ca: Path | None = None
    """Certificate to trust beside the system's."""


def main(args: Args) -> int:
    from astraflow.run.operate import operate
    from astraflow.wire.messages import OperatorRequest

    request = OperatorRequest(action="swap", policy=args.policy, source=args.source, version=args.version)
    asyncio.run(operate(args.run, request, ca=args.ca))
    print(f"{args.policy} plays with version {args.version} of {args.source} from now on")
    return 0
