"""Short hands of the rollout tests: replies, leases, an engine that says what it is told to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from astraflow.engines.base import EngineInfo, GenerateReply, GenerateRequest
from astraflow.rollout.agents import Seat
from astraflow.rollout.play import WorkflowPlayer
from astraflow.rollout.template import ChatTemplate
from astraflow.types import Episode, Lease, Manifest, Sampling, Span, StopReason, Task

END = 2
"""SmolLM2's <|im_end|>."""


def reply(
    ids: Sequence[int],
    *,
    stop: StopReason = StopReason.STOP,
    spans: tuple[Span, ...] | None = None,
    logprobs: Sequence[float] | None = None,
) -> GenerateReply:
    if spans is None:
        spans = (Span(start=0, stop=len(ids), version=3, digest="d3"),) if ids else ()
    return GenerateReply(
        tokens=np.array(ids, np.int32),
        logprobs=np.array([-0.1] * len(ids) if logprobs is None else logprobs, np.float32),
        spans=spans,
        stop_reason=stop,
    )


class ScriptedEngine:
    """Answers with the next of its replies; an exception among them is raised. Keeps what it was asked."""

    def __init__(self, *replies: GenerateReply | BaseException, max_context: int = 512) -> None:
        self.asked: list[GenerateRequest] = []
        self._replies = list(replies)
        self._max_context = max_context

    def info(self) -> EngineInfo:
        return EngineInfo(
            policy="main", max_context=self._max_context, vocabulary=49152, dtype="float32", versions=(3,), slots=8
        )

    async def start(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self.asked.append(request)
        answer = self._replies.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def load(self, manifest: Manifest, files: list[Path]) -> None: ...

    async def close(self) -> None: ...


def lease(
    *, group: int = 1, index: int = 0, seed: int = 7, payload: dict[str, Any] | None = None, **fields: Any
) -> Lease:
    return Lease(
        group=group,
        index=index,
        attempt=1,
        seed=seed,
        task=Task(key="t", payload=payload or {"prompt": "hi"}),
        **fields,
    )


def seat(engine: Any, template: ChatTemplate, *, policy: str = "main", max_tokens: int = 8) -> Seat:
    return Seat(policy=policy, engine=engine, template=template, sampling=Sampling(max_tokens=max_tokens))


async def play(workflow: Any, engine: Any, template: ChatTemplate, *, roles: Sequence[str] = ("main",)) -> Episode:
    player = WorkflowPlayer(workflow=workflow, seats={role: seat(engine, template) for role in roles})
    return await player(lease())
