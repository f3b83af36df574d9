"""Let a new policy join a run that goes on and play a role: trained, frozen, or a moving average of another.

It has the architecture, the settings and the end of the policy that it is taken from, or of one of the recipe that this
one is like; only its weights are its own.
"""

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
    """Its name."""
    source: str
    """POLICY, or POLICY@VERSION: it begins with these weights; of a moving average: what is averaged."""
    role: str
    """Which it plays from now on. Whoever did and plays nothing more is frozen."""
    model: Path | None = None
    """It begins with the weights of this folder; --source then says whose model it is like."""
    frozen: bool = False
    """It plays and is not trained."""
    decay: float | None = None
    """It is the moving average of --source, which keeps so much of itself with every version."""
    ca: Path | None = None
    """Certificate to trust beside the system's."""


def main(args: Args) -> int:
    from astraflow.run.adding import add_policy

    around = asyncio.run(add_policy(args))
    how = "is frozen" if args.frozen else "is trained" if args.decay is None else f"averages {args.source}"
    print(f"{args.policy} has joined, plays {args.role} and {how}")
    for line in around.played_lines(args.run, args.policy) if around else ():
        print(line)
    return 0
