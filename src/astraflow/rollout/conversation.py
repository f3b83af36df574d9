"""One agent's history, token-exact: what was sampled is recorded once and continued with the same ids (F22).

    messages ─ prompt ─► ids: recorded ids of the longest known history + glue     (an edited history: encoded anew)
    reply    ─ record ─► appended to that history's sample, or to a new one

A known history that has already gone on another way is copied as context: its tokens are trained once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from astraflow.engines.base import GenerateReply
from astraflow.errors import EngineFailed
from astraflow.rollout.template import ChatTemplate, Rendered
from astraflow.rollout.workflow import Message
from astraflow.types import Array, Sample, SampleKind, Span, Turn


@dataclass(kw_only=True, slots=True)
class _Branch:
    """A sample being written: four lists of one length (F31) and the spans over them."""

    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def context(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.sampled += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)

    def reply(self, reply: GenerateReply) -> None:
        at = len(self.tokens)
        self.tokens += reply.tokens.tolist()
        self.sampled += [True] * len(reply.tokens)
        self.logprobs += reply.logprobs.tolist()
        for span in reply.spans:
            self.spans.append(
                Span(start=at + span.start, stop=at + span.stop, version=span.version, digest=span.digest)
            )

    def target(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.sampled += [True] * len(tokens)
        self.logprobs += [0.0] * len(tokens)

    def sample(self, kind: SampleKind) -> Sample:
        return Sample(
            tokens=np.array(self.tokens, np.int32),
            sampled=np.array(self.sampled, np.bool_),
            logprobs=np.array(self.logprobs, np.float32),
            spans=tuple(self.spans),
            kind=kind,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Node:
    """A history up to and including one reply."""

    keys: tuple[str, ...]
    """The messages that were asked with."""
    plain: str
    """Their rendered text, then the reply's."""
    branch: int
    length: int
    """Tokens of the branch up to the end of the reply."""
    control: int | None
    """The control token that the reply ends with, if it does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What to ask the engine with, and where its reply belongs."""

    tokens: Array
    """int32 [P]"""
    keys: tuple[str, ...]
    messages: tuple[Message, ...]
    plain: str
    node: _Node | None
    """The known history that this one extends."""


class Conversation:
    def __init__(self, template: ChatTemplate, *, kind: SampleKind = SampleKind.RL) -> None:
        self._template = template
        self._kind = kind
        self._branches: list[_Branch] = []
        self._nodes: list[_Node] = []
        self.turns: list[Turn] = []

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(branch.sample(self._kind) for branch in self._branches)

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """Raises BadRequest when the template refuses the messages."""
        keys = tuple(_key(message) for message in messages)
        if not self._nodes:
            rendered, tokens = self._template.opening(messages, keys)
            return _prompt(tokens, keys, messages, rendered, None)
        rendered = self._template.render(messages)
        for node in sorted(self._nodes, key=lambda each: len(each.keys), reverse=True):
            rest = self._rest(node, keys, messages, rendered)
            if rest is not None:
                known = self._branches[node.branch].tokens[: node.length]
                tokens = known + self._template.encode(rest, start=False)
                return _prompt(tokens, keys, messages, rendered, node)
        return _prompt(self._template.encode(rendered), keys, messages, rendered, None)

    def record(self, prompt: Prompt, reply: GenerateReply, *, index: int, parent: int | None = None) -> str:
        """Append a reply; returns its text, without the control token that ended it. Raises EngineFailed when its
        lists do not fit together (F27); nothing is recorded then."""
        check_reply(reply)
        where = self._branch_for(prompt)
        branch = self._branches[where]
        start = len(branch.tokens)
        branch.reply(reply)
        return self._ended(
            prompt,
            where,
            Turn(
                index=index,
                sample=where,
                start=start,
                stop=len(branch.tokens),
                stop_reason=reply.stop_reason,
                parent=parent,
            ),
        )

    def target(self, prompt: Prompt, reply: str, *, index: int) -> None:
        """Append a reply that nobody sampled, with the control token that ends it: what supervised training aims at."""
        ids = self._template.encode_reply(reply)
        end = self._template.end_of(prompt.plain, reply, prompt.messages)
        where = self._branch_for(prompt)
        branch = self._branches[where]
        start = len(branch.tokens)
        branch.target(ids if end is None else [*ids, end])
        self._ended(prompt, where, Turn(index=index, sample=where, start=start, stop=len(branch.tokens)))

    def _ended(self, prompt: Prompt, where: int, turn: Turn) -> str:
        """A reply stands in the branch: it can be continued from now on. Returns its text."""
        ids = self._branches[where].tokens[turn.start : turn.stop]
        control = ids[-1] if ids and ids[-1] in self._template.control_ids else None
        text = self._template.decode(ids if control is None else ids[:-1])
        plain = prompt.plain + text
        self._nodes.append(_Node(keys=prompt.keys, plain=plain, branch=where, length=turn.stop, control=control))
        self.turns.append(turn)
        return text

    def _rest(
        self, node: _Node, keys: tuple[str, ...], messages: Sequence[Message], rendered: Rendered
    ) -> Rendered | None:
        """What follows the node's last token if the history extends it, in the messages and in the rendered text."""
        known = len(node.keys)
        if len(keys) <= known or keys[:known] != node.keys or messages[known].get("role") != "assistant":
            return None
        rest = rendered.after(node.plain)
        if rest is None:
            rest = rendered.after(node.plain.rstrip())  # templates may trim a reply: the ids that it saw still stand
        if rest is None or node.control is None:
            return rest
        closing = self._template.leading_control(rest)
        return closing[1] if closing is not None and closing[0] == node.control else rest

    def _branch_for(self, prompt: Prompt) -> int:
        """The sample to append to, its context written."""
        node = prompt.node
        if node is not None and len(self._branches[node.branch].tokens) == node.length:
            self._branches[node.branch].context(prompt.tokens[node.length :].tolist())
            return node.branch
        self._branches.append(_Branch())
        self._branches[-1].context(prompt.tokens.tolist())
        return len(self._branches) - 1


def _prompt(
    tokens: list[int], keys: tuple[str, ...], messages: Sequence[Message], rendered: Rendered, node: _Node | None
) -> Prompt:
    ids = np.array(tokens, np.int32)
    return Prompt(tokens=ids, keys=keys, messages=tuple(messages), plain=rendered.plain, node=node)


def check_reply(reply: GenerateReply) -> None:
    """Token ids, log-probs and spans belong together, or the reply is worthless. Raises EngineFailed."""
    count = len(reply.tokens)
    if len(reply.logprobs) != count:
        raise EngineFailed(f"engine reply: {count} tokens, but {len(reply.logprobs)} logprobs")
    if not np.isfinite(reply.logprobs).all():
        raise EngineFailed("engine reply: a log-prob is not finite")
    at = 0
    for span in reply.spans:
        if span.start != at or span.stop <= at:
            raise EngineFailed(f"engine reply: spans must follow each other from 0, found {span} after {at}")
        at = span.stop
    if at != count:
        raise EngineFailed(f"engine reply: {count} tokens, but spans cover {at}")


def _key(message: Message) -> str:
    """Equal for equal messages, and unmoved when the caller changes his list later."""
    return json.dumps(message, sort_keys=True, ensure_ascii=False, default=repr)
