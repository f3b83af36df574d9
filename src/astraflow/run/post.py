"""A place of the launcher, the process that fills it, and what dataflow's status says of that process."""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass
from pathlib import Path

from astraflow.run.child import Child, ChildSpec
from astraflow.run.layout import CACHE
from astraflow.run.silence import Silence
from astraflow.run.useful import Useful
from astraflow.wire.calls import Role
from astraflow.wire.goodbye import TOLD
from astraflow.wire.messages import StatusReply


@dataclass(kw_only=True)
class Post:
    """A place that must be filled until the run ends."""

    spec: ChildSpec
    role: Role
    policy: str | None
    child: Child | None = None
    useful: Useful | None = None
    silence: Silence | None = None
    """Of ``child``, like ``useful``."""
    starts: int = 0
    quick_deaths: int = 0
    """In a row."""
    left: bool = False
    """Ended by itself with 0: nothing more to do there."""
    told: bool = False
    """That it left was said."""


def is_heard(post: Post, status: StatusReply | None, asked_at: float) -> bool | None:
    """None: nobody can tell, for dataflow does not answer."""
    if post.role is Role.OPERATOR:
        return status is not None
    if status is None:
        return None
    name = post.policy if post.role is Role.TRAINER else post.useful and post.useful.name
    kind = "trainer" if post.role is Role.TRAINER else "rollout"
    for each in status.components:
        if (each.component, each.name) == (kind, name):
            # A trainer's name may still be that of the process before it.
            own = post.child is not None and asked_at - each.heard_s > post.child.started_s
            return each.state != "dead" and own
    return False


def caches_of(run: Path, name: str) -> list[Path]:
    """What a process of this post left behind that was killed."""
    return [path for pattern in ("-*", ".*") for path in run.glob(f"{CACHE}{name}{pattern}")]


def death_words(name: str, child: Child, lived_s: float) -> str:
    """``X died with exit code 1 after 5 s: why``, if it said why."""
    why = f": {child.sentence}" if child.sentence else ""
    return f"{name} died with {exit_words(child.code)} after {lived_s:.0f} s{why}"


def given_up_words(name: str, child: Child, times: int) -> str:
    """Why it is not started again: how it ended the last time, and what it said then."""
    return f"{name} died {times} times in a row, the last time with {exit_words(child.code)}: {child.last_words()}"


def exit_words(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def set_back(before: StatusReply | None, status: StatusReply) -> list[str]:
    """What is to be said of policies whose version fell."""
    was = {each.policy: each.version for each in before.policies if each.trainable} if before is not None else {}
    return [
        f"policy {each.policy} is back at version {each.version}, it was at {was[each.policy]}: its trainer went on "
        "from its newest checkpoint, or somebody rolled it back; the same batches are trained again"
        for each in status.policies
        if each.version < was.get(each.policy, 0)
    ]


def why_left(post: Post, status: StatusReply) -> str:
    """``: it was told to stop``, if dataflow was told."""
    name = post.useful.name if post.useful is not None else post.spec.name
    names = (name, post.policy)  # a trainer is known by its policy
    said = [each.report.why for each in status.components if each.name in names and each.state == "left"]
    return f": {said[0]}" if said and said[0] else ""


def was_told(post: Post, status: StatusReply) -> bool:
    """Somebody stopped it on purpose: that is his business."""
    return why_left(post, status).endswith(TOLD)
