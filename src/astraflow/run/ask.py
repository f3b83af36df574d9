"""One question to a running dataflow, by run folder or by URL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from astraflow.errors import AstraFlowError, ConfigError, Unavailable
from astraflow.run.layout import RunFolder
from astraflow.wire.client import HttpDataflow
from astraflow.wire.tokens import Tokens, from_environment

T = TypeVar("T")


def address(run: str) -> tuple[str, str | None]:
    """URL and token. Raises ConfigError where no dataflow has ever listened."""
    if "://" in run:
        return run, from_environment()
    folder = RunFolder(Path(run)).require()
    return folder.url(), Tokens.read(folder.path).operator


async def ask(run: str, question: Callable[[HttpDataflow], Awaitable[T]], *, ca: Path | None = None) -> T:
    """Raises ConfigError if nobody answers there."""
    from astraflow.run.over import is_over, over_words

    url, token = address(run)
    folder = None if "://" in run else RunFolder(Path(run))
    async with HttpDataflow(url, token, retry_s=2.0, timeout_s=10.0, ca=ca) as client:
        try:
            return await question(client)
        except AstraFlowError as error:
            if folder is not None and is_over(folder):
                raise ConfigError(over_words(folder)) from error
            if not isinstance(error, Unavailable):
                raise
            raise ConfigError(f"no dataflow answers at {url}: it has ended, or is not reached from here") from error
