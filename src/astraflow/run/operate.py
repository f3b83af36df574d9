"""An operator's call to the dataflow of a run, from its folder or by URL."""

from __future__ import annotations

from pathlib import Path

from astraflow.errors import ConfigError, Unavailable
from astraflow.run.layout import RunFolder
from astraflow.wire.client import HttpDataflow
from astraflow.wire.messages import OperatorRequest
from astraflow.wire.tokens import Tokens, from_environment


def dataflow_of(run: str) -> tuple[str, str | None] | None:
    """URL and token; None: a run folder in which no dataflow has listened. Raises ConfigError for what is no run."""
    if "://" in run:
        return run, from_environment()
    folder = RunFolder(Path(run)).require()
    return (folder.url(), Tokens.read(folder.path).operator) if folder.endpoint.exists() else None


async def operate(run: str, request: OperatorRequest) -> None:
    """Raises what dataflow refuses, and ConfigError when none answers."""
    found = dataflow_of(run)
    if found is None:
        raise ConfigError(f"no dataflow serves {run}: this is for a run that goes on")
    async with HttpDataflow(*found, retry_s=2.0, timeout_s=10.0) as client:
        try:
            await client.operate(request)
        except Unavailable as error:
            raise ConfigError(f"no dataflow answers at {found[0]}: this is for a run that goes on") from error
