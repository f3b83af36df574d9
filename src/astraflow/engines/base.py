"""What a rollout service asks of an inference engine: tokens in, tokens out. One Engine serves one policy."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from astraflow.types import Array, Manifest, Record, Sampling, Span, StopReason


class GenerateRequest(Record, frozen=True, kw_only=True):
    tokens: Array
    """int32 [P]: the whole prompt."""
    sampling: Sampling
    """``seed`` is set; ``max_tokens`` is cut to the room that the context leaves (F28)."""
    version: int | None = None
    """Which of the held weight sets; None: the newest, and in-flight updates apply."""
    prefix_group: str = ""
    """Hint: requests of one value share a long prompt prefix (the episodes of a group)."""


class GenerateReply(Record, frozen=True, kw_only=True):
    tokens: Array
    """int32 [N], N >= 0: only what was sampled, the stop token included (it was sampled)."""
    logprobs: Array
    """float32 [N]"""
    spans: tuple[Span, ...]
    """Over [0, N)."""
    stop_reason: StopReason


class EngineInfo(Record, frozen=True, kw_only=True):
    policy: str
    max_context: int
    vocabulary: int
    dtype: str
    versions: tuple[int, ...]
    """Held, oldest first; empty before the first load."""
    digests: dict[int, str] = {}
    slots: int = 0
    versions_held: int = 1
    """Weight sets that it has room for."""


class Engine(Protocol):
    """Cancel a request by cancelling the task that awaits it; its slot is free within two decode steps (F88)."""

    def info(self) -> EngineInfo: ...

    async def start(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Raises BadRequest (prompt_too_long: final, never retried), NotFound (version not held)."""

    async def load(self, manifest: Manifest, files: list[Path]) -> None:
        """Take these verified files as ``manifest.version`` between two decode steps. The version that replies name
        changes only once the new weights are in place and their digest was checked (F56).
        Raises DigestMismatch, WeightsRefused; the old weights then stay and serve on."""

    async def close(self) -> None: ...
