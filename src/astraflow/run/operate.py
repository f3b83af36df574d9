"""An operator's call to the dataflow of a run, from its folder or by URL."""

from __future__ import annotations

from pathlib import Path

from astraflow.errors import ConfigError, Unavailable
from astraflow.run.layout import RunFolder
from astraflow.run.over import is_alive, over_words, silent_words
from astraflow.wire.client import HttpDataflow
from astraflow.wire.messages import OperatorRequest
from astraflow.wire.tokens import Tokens, from_environment

GONE_S, BUSY_S = 2.0, 15.0


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


def unanswered(url: str) -> str:
    return f"no dataflow answers at {url}: it has ended, is not reached from here, or is too busy"


def patience_s(run: str) -> float:
    """How long somebody at a terminal waits for an answer: of a dataflow that lives longer, for it may be busy."""
    return GONE_S if "://" not in run and not is_alive(RunFolder(Path(run))) else BUSY_S


async def operate(run: str, request: OperatorRequest, *, ca: Path | None = None) -> tuple[str, ...] | None:
    """Which policies are trained after it; None: dataflow did not live to tell.

    Raises what dataflow refuses, and ConfigError when none answers. ``ca``: certificate to trust.
    """
    found = require_dataflow(run)
    async with HttpDataflow(*found, retry_s=patience_s(run), ca=ca) as client:
        try:
            await client.operate(request)
        except Unavailable as error:
            unknown = f"whether it did what was asked is not known: 'astraflow status {run}' tells"
            if "://" in run:
                raise ConfigError(f"{unanswered(run)}; {unknown}") from error
            folder = RunFolder(Path(run))
            if is_alive(folder):
                raise ConfigError(f"{silent_words(folder)}; {unknown}") from error
            raise ConfigError(f"this is for a run that goes on: {over_words(folder)}") from error
        try:
            after = await client.status()
        except Unavailable:
            return None
        return tuple(each.policy for each in after.policies if each.trainable and each.version < each.steps)
