"""The rollout workers of a run: region, versions, rate, staleness of what they sent, lag of their weights, why not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class Args:
    run: Positional[str]
    """Run folder, or URL of its dataflow (the token is then taken from ASTRAFLOW_TOKEN)."""
    ca: Path | None = None
    """Certificate to trust beside the system's."""
    json: bool = False
    """One JSON object."""


def main(args: Args) -> int:
    import msgspec

    from astraflow.observe.pool import pool_lines
    from astraflow.run.ask import ask
    from astraflow.run.layout import RunFolder
    from astraflow.run.over import say_over
    from astraflow.wire.finite import require_finite

    pool = asyncio.run(ask(args.run, lambda client: client.pool(), ca=args.ca))
    if pool is None:
        return say_over(RunFolder(Path(args.run)), as_json=args.json)
    if args.json:
        require_finite(pool)
        print(msgspec.json.encode(pool).decode())
    else:
        print("\n".join(pool_lines(pool)))
    return 0
