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
    json: bool = False
    """The whole status as one JSON object."""


def main(args: Args) -> int:
    import msgspec

    from astraflow.observe.status import status_lines
    from astraflow.wire.finite import require_finite

    status = asyncio.run(_ask(args.run))
    if args.json:
        require_finite(status)
        print(msgspec.json.encode(status).decode())
    else:
        print("\n".join(status_lines(status)))
    return 0


async def _ask(run: str):  # type: ignore[no-untyped-def]
    from astraflow.errors import ConfigError, Unavailable
    from astraflow.run.layout import RunFolder
    from astraflow.wire.client import HttpDataflow
    from astraflow.wire.tokens import Tokens, from_environment

    if "://" in run:
        url, token = run, from_environment()
    else:
        folder = RunFolder(Path(run)).require()
        url, token = folder.url(), Tokens.read(folder.path).operator
    async with HttpDataflow(url, token, retry_s=2.0, timeout_s=10.0) as client:
        try:
            return await client.status()
        except Unavailable as error:
            raise ConfigError(
                f"no dataflow answers at {url}: the run is not going on (astraflow resume {run})"
            ) from error
