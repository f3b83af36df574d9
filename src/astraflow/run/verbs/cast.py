"""Let another policy of a run that goes on play a role, in every group that is opened from now on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class Args:
    run: Positional[str]
    """Run folder, or URL of its dataflow (the token is then taken from ASTRAFLOW_TOKEN)."""
    role: Positional[str]
    """Of the workflow."""
    policy: Positional[str]
    """Who plays it. Whoever did and plays nothing more is frozen."""
    ca: Path | None = None
    """Certificate to trust beside the system's."""


def main(args: Args) -> int:
    from astraflow.run.operate import operate
    from astraflow.wire.messages import OperatorRequest

    request = OperatorRequest(action="cast", role=args.role, policy=args.policy)
    around = asyncio.run(operate(args.run, request, ca=args.ca))
    print(f"{args.policy} plays {args.role} from now on")
    for line in around.played_lines(args.run, args.policy) if around else ():
        print(line)
    return 0
