"""An operator's call to the dataflow of a run, from its folder or by URL."""

from __future__ import annotations

from pathlib import Path

from astraflow.errors import ConfigError, Unavailable
from astraflow.run.layout import RunFolder
from astraflow.run.over import over_words
from astraflow.wire.client import HttpDataflow
from astraflow.wire.messages import OperatorRequest
from astraflow.wire.tokens import Tokens, from_environment


def dataflow_of(run: str) -> tuple[str, str | None] | None:
    """URL and token; None: a run folder in which no dataflow has listened. Raises ConfigError for what is no run."""
    if "://" in run:
        return run, from_environment()
    folder = RunFolder(Path(run)).require()
    return (folder.url(), Tokens.read(folder.path).operator) if folder.endpoint.exists() else None


def require_dataflow(run: str) -> tuple[str, str | None]:
    """URL and token. Raises ConfigError where none listens: the run is stopped, or all of it is in one process."""
    found = dataflow_of(run)
    if found is None:
        raise ConfigError(f"this is for a run that goes on and can be asked: {over_words(RunFolder(Path(run)))}")
    return found


async def operate(run: str, request: OperatorRequest) -> None:
    """Raises what dataflow refuses, and ConfigError when none answers."""
    found = require_dataflow(run)
    async with HttpDataflow(*found, retry_s=2.0, timeout_s=10.0) as client:
        try:
            await client.operate(request)
        except Unavailable as error:
            raise ConfigError(f"no dataflow answers at {found[0]}: this is for a run that goes on") from error
