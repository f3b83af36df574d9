"""Who does what, who waits for what: one line a component."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

if TYPE_CHECKING:
    from astraflow.wire.messages import StatusReply


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
    if status is None:
        return _over(Path(args.run), as_json=args.json)
    if args.json:
        require_finite(status)
        print(msgspec.json.encode(status).decode())
    else:
        print("\n".join(status_lines(status)))
    return 0


def _over(path: Path, *, as_json: bool) -> int:
    """Nothing runs: what the ledger says. 0 if the run has finished, else 1."""
    from astraflow.run.layout import RunFolder
    from astraflow.run.over import over_words, stored_state

    run = RunFolder(path)
    state, error = stored_state(run)
    print(json.dumps({"run": str(path), "state": state, "error": error}) if as_json else over_words(run))
    return 0 if state == "finished" else 1


async def _ask(run: str) -> StatusReply | None:
    """None: of a run folder whose dataflow does not answer."""
    from astraflow.errors import AstraFlowError, ConfigError, Unavailable
    from astraflow.run.layout import RunFolder
    from astraflow.run.operate import dataflow_of
    from astraflow.run.over import is_over
    from astraflow.wire.client import HttpDataflow

    is_url = "://" in run
    found = dataflow_of(run)
    if found is None:
        return None
    url, token = found
    async with HttpDataflow(url, token, retry_s=2.0, timeout_s=10.0) as client:
        try:
            return await client.status()
        except AstraFlowError as error:
            is_gone = isinstance(error, Unavailable)
            if not is_url and (is_gone or is_over(RunFolder(Path(run)))):
                return None
            if not is_gone:
                raise
            raise ConfigError(f"no dataflow answers at {url}: it has ended, or is not reached from here") from error
