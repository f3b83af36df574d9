"""End a policy of a run that goes on at the version that it has: it plays on, the others are trained."""

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
    """One that is trained in it; to unfreeze, one that was frozen."""
    ca: Path | None = None
    """Certificate to trust beside the system's."""


def main(args: Args) -> int:
    from astraflow.run.operate import operate
    from astraflow.wire.messages import OperatorRequest

    around = asyncio.run(operate(args.run, OperatorRequest(action="freeze", policy=args.policy), ca=args.ca))
    print(f"{args.policy} is frozen: its trainer ends, it plays on with its last version")
    for line in around.over_lines(args.run) if around else ():
        print(line)
    return 0
