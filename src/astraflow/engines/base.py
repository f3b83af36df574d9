"""What a rollout service asks of an inference engine: tokens in, tokens out. One Engine serves one policy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

from astraflow.types import Array, Manifest, Record, Sampling, Span, StopReason
from astraflow.weights.tensors import Tensor


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
        Raises DigestMismatch, WeightsRefused; the old weights then stay and serve on. For a version that is held it
        takes the files all the same: what it holds was found to be something else."""

    async def close(self) -> None: ...


@runtime_checkable
class ShowsTensors(Protocol):
    """An engine may offer this beside: its weights, so that they can be compared with what was published."""

    def tensors(self, version: int) -> Iterable[Tensor] | None:
        """What it computes with, by the names of a checkpoint, one after the other; None: they cannot be shown.
        Blocking, off the decode path. Raises NotFound (version not held)."""


@runtime_checkable
class Scores(Protocol):
    """An engine may offer this beside: how likely it finds a given reply."""

    async def score(self, prompt: Array, reply: Array, version: int) -> Array:
        """float32 [N]: log-probs at temperature 1 of the reply's tokens (int32 [N]), computed on the way that sampled
        replies take: through its caches, token by token. Raises BadRequest, NotFound."""
