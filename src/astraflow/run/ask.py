"""One question to a running dataflow, by run folder or by URL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from astraflow.errors import AstraFlowError, ConfigError, Unavailable
from astraflow.run.layout import RunFolder
from astraflow.run.operate import dataflow_of, patience_s, unanswered
from astraflow.run.over import is_over, over_words
from astraflow.wire.client import HttpDataflow

T = TypeVar("T")


def address(run: str) -> tuple[str, str | None]:
    """URL and token. Raises ConfigError where no dataflow has ever listened."""
    found = dataflow_of(run)
    if found is None:
        raise ConfigError(over_words(RunFolder(Path(run))))
    return found


async def ask(run: str, question: Callable[[HttpDataflow], Awaitable[T]], *, ca: Path | None = None) -> T | None:
    """None: of a run folder that nobody serves now; ``say_over`` tells why. Raises ConfigError if nobody answers at a
    URL."""
    found = dataflow_of(run)
    if found is None:
        return None
    url, token = found
    async with HttpDataflow(url, token, retry_s=patience_s(run), ca=ca) as client:
        try:
            return await question(client)
        except AstraFlowError as error:
            is_gone = isinstance(error, Unavailable)
            if "://" not in run and (is_gone or is_over(RunFolder(Path(run)))):
                return None
            if not is_gone:
                raise
            raise ConfigError(unanswered(url)) from error
