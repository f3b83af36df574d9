"""An operator's call to the dataflow of a run, from its folder or by URL."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from astraflow.errors import BadRequest, ConfigError, InvalidRecord, NotFound, Unavailable
from astraflow.run.layout import RunFolder
from astraflow.run.over import is_alive, over_words, silent_words
from astraflow.wire.client import HttpDataflow
from astraflow.wire.messages import OperatorRequest, PolicyStatus, StatusReply
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Around:
    """A run's policies before a call and after it."""

    before: tuple[PolicyStatus, ...]
    after: tuple[PolicyStatus, ...]

    @property
    def trained(self) -> tuple[str, ...]:
        return tuple(each.policy for each in self.after if each.trainable and each.version < each.steps)

    def was_frozen(self, policy: str) -> bool:
        return any(each.frozen for each in self.before if each.policy == policy)

    def played_lines(self, run: str, policy: str) -> list[str]:
        """What else it means that ``policy`` plays a role now."""
        frozen = [each.policy for each in self.after if each.frozen]
        lines = [f"{name} plays nothing more and is frozen" for name in frozen if not self.was_frozen(name)]
        if policy in frozen:
            lines.append(f"{policy} is frozen: 'astraflow unfreeze {run} {policy}' trains it")
        return lines + (self.over_lines(run) if lines else [])

    def over_lines(self, run: str) -> list[str]:
        said = f"no policy of {run} is trained any more: the run ends after its last evaluation"
        return [] if self.trained else [said]


async def operate(run: str, request: OperatorRequest, *, ca: Path | None = None) -> Around | None:
    """None: dataflow did not live to tell what is after it.

    Raises what dataflow refuses, and ConfigError when none answers. ``ca``: certificate to trust.
    """
    found = require_dataflow(run)
    async with HttpDataflow(*found, retry_s=patience_s(run), ca=ca) as client:
        before: StatusReply | None = None
        try:
            before = await client.status()
            await client.operate(request)
        except Unavailable as error:
            raise _unanswered_call(run, asked=before is not None) from error
        except (NotFound, InvalidRecord) as error:
            raise BadRequest(str(error)) from error  # as whatever else is wrong with a call
        try:
            after = await client.status()
        except Unavailable:
            return None
        return Around(before=before.policies, after=after.policies)


def _unanswered_call(run: str, *, asked: bool) -> ConfigError:
    unknown = f"whether it did what was asked is not known: 'astraflow status {run}' tells"
    done = unknown if asked else "nothing was changed"
    if "://" in run:
        return ConfigError(f"{unanswered(run)}; {done}")
    folder = RunFolder(Path(run))
    if is_alive(folder):
        return ConfigError(f"{silent_words(folder)}; {done}")
    return ConfigError(f"this is for a run that goes on: {over_words(folder)}")
