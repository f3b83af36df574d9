"""Who does what, who waits for what: one line a component."""

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
    """The whole status as one JSON object."""


def main(args: Args) -> int:
    import msgspec

    from astraflow.observe.status import status_lines
    from astraflow.run.ask import ask
    from astraflow.run.layout import RunFolder
    from astraflow.run.over import say_over
    from astraflow.wire.finite import require_finite

    status = asyncio.run(ask(args.run, lambda client: client.status(), ca=args.ca))
    if status is None:
        return say_over(RunFolder(Path(args.run)), as_json=args.json)
    if args.json:
        require_finite(status)
        print(msgspec.json.encode(status).decode())
    else:
        print("\n".join(status_lines(status)))
    return 0
