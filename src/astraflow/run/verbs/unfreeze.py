"""Train a policy of a run that goes on further, which was frozen: to the end that the recipe names."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class Args:
    run: Positional[str]
    """Run folder, or URL of its dataflow (the token is then taken from ASTRAFLOW_TOKEN)."""
    policy: Positional[str]
    """One that was frozen."""


def main(args: Args) -> int:
    from astraflow.run.operate import operate
    from astraflow.wire.messages import OperatorRequest

    asyncio.run(operate(args.run, OperatorRequest(action="unfreeze", policy=args.policy)))
    print(f"{args.policy} is trained again; the launcher starts its trainer, without one start 'astraflow trainer'")
    return 0
