"""One request while it is decoded: its tokens, its limits, and when it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from astraflow.engines.base import GenerateReply, GenerateRequest
from astraflow.types import Span, StopReason

TextOf = Callable[[list[int]], str]
_STOP_WINDOW = 8
"""Tokens beyond the longest stop string that are turned into text to look for it."""


@dataclass(slots=True)
class Held:
    """One weight set in memory."""

    version: int
    digest: str
    serial: int
    weights: Any
    pins: int = 0
    """Requests that name this version and have not ended."""
    named_at: float = 0.0
    """When a request last named this version."""


@dataclass(slots=True, eq=False)
class Sequence:
    request: GenerateRequest
    most: int
    """Tokens that it may sample."""
    ends: frozenset[int]
    done: Callable[[GenerateReply | Exception], None]
    held: Held | None = None
    """Set when it takes a slot."""
    slot: int = -1
    tokens: list[int] = field(default_factory=list)
    """The prompt and what was sampled."""
    cached: int = 0
    """Leading tokens whose keys and values are in the slot."""
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    cancelled: bool = False
    given: tuple[int, ...] = ()
    """What it shall say: it is scored, nothing is drawn."""
    waits_for: Sequence | None = None
    """A sequence that is computing a prefix which this one then need not compute."""
    waits_until: int = 0
    """Length of that prefix."""

    @property
    def prompt_length(self) -> int:
        return len(self.request.tokens)

    @property
    def sampled(self) -> int:
        return len(self.logprobs)

    @property
    def remaining(self) -> int:
        """Tokens not yet in the slot; one means that the next token can be sampled in this step."""
        return len(self.tokens) - self.cached

    def take(self, token: int, logprob: float, text_of: TextOf) -> StopReason | None:
        """Append a sampled token; the reason if it was the last one."""
        assert self.held is not None
        at = self.sampled
        self.tokens.append(token)
        self.logprobs.append(logprob)
        start = at
        if self.spans and (self.spans[-1].version, self.spans[-1].digest) == (self.held.version, self.held.digest):
            start = self.spans.pop().start
        self.spans.append(Span(start=start, stop=at + 1, version=self.held.version, digest=self.held.digest))
        if token in self.ends or self._stops(text_of):
            return StopReason.STOP
        return StopReason.LENGTH if self.sampled >= self.most else None

    def _stops(self, text_of: TextOf) -> bool:
        """An earlier match would have ended the reply: only one that the last token completes can be new."""
        stop = self.request.sampling.stop
        if not stop:
            return False
        longest = max(len(text.encode()) for text in stop)
        tail = self.tokens[max(self.prompt_length, len(self.tokens) - longest - _STOP_WINDOW) :]
        text = text_of(tail)
        return any(one in text for one in stop)

    def reply(self, reason: StopReason) -> GenerateReply:
        return GenerateReply(
            tokens=np.array(self.tokens[self.prompt_length :], np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            spans=tuple(self.spans),
            stop_reason=reason,
        )
