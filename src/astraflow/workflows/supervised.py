"""Supervised rows: a finished conversation is tokenised, its assistant replies are the targets. Needs no engine.

Plays tasks whose ``workflow`` is ``supervised``; payload: ``messages`` (a list of role and content) and ``policy``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from astraflow.errors import BadRequest
from astraflow.rollout.conversation import Conversation
from astraflow.rollout.play import failed
from astraflow.rollout.template import ChatTemplate
from astraflow.rollout.workflow import Message
from astraflow.types import Episode, FailureKind, Lease, Outcome, Sample, SampleKind, Trajectory

NAME = "supervised"


class Supervised:
    """A ``rollout.play.Player``. ``templates``: by policy."""

    def __init__(self, templates: Mapping[str, ChatTemplate]) -> None:
        self._templates = templates

    async def __call__(self, lease: Lease) -> Episode:
        try:
            trajectory = self._trajectory(lease.task.payload)
        except BadRequest as error:
            return failed(lease, FailureKind.WORKFLOW, f"supervised task {lease.task.key!r}: {error}")
        return Episode(task_key=lease.task.key, outcome=Outcome.COMPLETED, trajectories=(trajectory,))

    def _trajectory(self, payload: Mapping[str, Any]) -> Trajectory:
        policy, messages = payload.get("policy"), payload.get("messages")
        if not isinstance(policy, str) or policy not in self._templates:
            raise BadRequest(f"payload.policy must be one of {sorted(self._templates)}, found {policy!r}")
        return Trajectory(agent=NAME, role=NAME, policy=policy, **_rows(self._templates[policy], _checked(messages)))


def tokenised(template: ChatTemplate, messages: Any) -> tuple[Sample, ...]:
    """A conversation as supervised samples. Raises BadRequest saying what is wrong with it."""
    samples: tuple[Sample, ...] = _rows(template, _checked(messages))["samples"]
    return samples


def _rows(template: ChatTemplate, messages: Sequence[Message]) -> dict[str, Any]:
    """One sample for the whole conversation, more where the template shows earlier replies otherwise."""
    conversation = Conversation(template, kind=SampleKind.SUPERVISED)
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = conversation.prompt(messages[:at])
            conversation.target(prompt, message["content"], index=len(conversation.turns))
    return {"samples": conversation.samples, "turns": tuple(conversation.turns)}


def _checked(messages: Any) -> list[Message]:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise BadRequest(f"payload.messages must be a list, found {type(messages).__name__}")
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str) or "role" not in message:
            raise BadRequest(f"payload.messages[{at}] must have a role and a content of text, found {message!r:.200}")
    if not any(message["role"] == "assistant" for message in messages[1:]):
        raise BadRequest("payload.messages needs an assistant reply after the first message: nothing to learn from")
    if messages[0]["role"] == "assistant":
        raise BadRequest("payload.messages begins with an assistant reply: nothing asks for it")
    return list(messages)
