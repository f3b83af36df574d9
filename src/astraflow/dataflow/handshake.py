"""Who may join: a process of the same config and code. A refusal names the settings that differ (F99)."""

from __future__ import annotations

from collections.abc import Mapping

from astraflow.dataflow.settings import RunSpec
from astraflow.errors import ConfigMismatch
from astraflow.wire.messages import HelloRequest, LeaseRequest

SHOWN = 8
"""Settings that are named; the others are counted."""
PATH_CHARS, VALUE_CHARS = 100, 60
ABSENT = "absent"


def require_same(spec: RunSpec, request: HelloRequest) -> None:
    """Raises ConfigMismatch unless it was started from what the run was started from."""
    who = f"{request.component} {request.name!r}"
    _require(spec, who, config=request.config_digest, code=request.code_digest, settings=request.config)


def require_same_worker(spec: RunSpec, request: LeaseRequest) -> None:
    """The same of one that asks for work, whether or not it has said who it is. Raises ConfigMismatch."""
    can = request.capabilities
    _require(spec, f"rollout {request.worker!r}", config=can.config_digest, code=can.code_digest, settings={})


def _require(spec: RunSpec, who: str, *, config: str, code: str, settings: Mapping[str, str]) -> None:
    for what, ours, theirs in (("config", spec.config_digest, config), ("code", spec.code_digest, code)):
        if ours and ours != theirs:
            table = differences(spec.config, settings) if what == "config" and settings else ""
            raise ConfigMismatch(
                f"{who} has {what} {theirs[:12] or 'of no digest'}, "
                f"run {spec.run} has {ours[:12]}: start it from the same {what}" + (f"; {table}" if table else "")
            )


def differences(run: Mapping[str, str], other: Mapping[str, str]) -> str:
    """``what differs: steps is 4 in the run, 5 there; ...``; empty if nothing does."""
    paths = sorted(path for path in run.keys() | other.keys() if run.get(path) != other.get(path))
    if not paths:
        return ""
    shown = [f"{_cut(path, PATH_CHARS)} is {_of(run, path)} in the run, {_of(other, path)} there" for path in paths]
    more = f"; and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return "what differs: " + "; ".join(shown[:SHOWN]) + more


def _of(config: Mapping[str, str], path: str) -> str:
    return _cut(config[path], VALUE_CHARS) if path in config else ABSENT


def _cut(text: str, most: int) -> str:
    """One line of bounded length: it was sent by someone whom nobody knows yet."""
    line = " ".join(text[: most + 1].split())
    return line if len(text) <= most else line[: most - 3] + "..."
