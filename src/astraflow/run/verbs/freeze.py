"""End a policy of a run that goes on at the version that it has: it plays on, the others are trained."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

FROZEN = "is frozen: its trainer ends, it plays on with its last version"


@dataclass(frozen=True, kw_only=True)
class Args:
    run: Positional[str]
    """Run folder, or URL of its dataflow (the token is then taken from ASTRAFLOW_TOKEN)."""
    policy: Positional[str]
    """One that is trained in it; to unfreeze, one that was frozen."""
    ca: Path | None = None
    """Certificate to trust beside the system's."""


def main(args: Args, *, action: str = "freeze", said: str = FROZEN) -> int:
    from astraflow.run.operate import operate
    from astraflow.wire.messages import OperatorRequest

    left = asyncio.run(operate(args.run, OperatorRequest(action=action, policy=args.policy), ca=args.ca))
    print(f"{args.policy} {said}")
    if left == ():
        print(f"no policy of {args.run} is trained any more: the run ends after its last evaluation")
    return 0
