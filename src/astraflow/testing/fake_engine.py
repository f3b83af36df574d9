"""An inference engine without a model: token n of a reply is a pure function of (seed, n, version).

It keeps every promise of ``engines.base.Engine`` that the components rely on: slots, first come first served, spans
that name the weights as loaded, prompts that are too long, cancelling, held versions. Time passes by ``asyncio.sleep``
alone, so under the simulator's loop it costs nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from astraflow.engines.base import EngineInfo, GenerateReply, GenerateRequest
from astraflow.engines.draws import uniform
from astraflow.errors import BadRequest, NotFound, Unavailable
from astraflow.types import Manifest, Span, StopReason


class FakeEngine:
    """``tick_s`` is the time of one decode step, ``load_s`` that of a load. ``before_load`` may raise what it raises
    (``DigestMismatch``, ``WeightsRefused``): the old weights then serve on. Not ``by_version``: every version samples
    the same, so that an episode is as long under any schedule.
    """

    def __init__(
        self,
        *,
        policy: str = "policy",
        slots: int = 16,
        vocabulary: int = 64,
        max_context: int = 4096,
        end_id: int = 0,
        end_chance: float = 0.125,
        tick_s: float = 0.01,
        load_s: float = 0.0,
        versions_held: int = 1,
        max_waiting: int = 4096,
        before_load: Callable[[Manifest], None] | None = None,
        by_version: bool = True,
    ) -> None:
        self.steps = 0
        """Decode steps made so far, all requests together."""
        self.busy = 0
        """Requests that hold a slot."""
        self.waiting = 0
        self.loads: list[int] = []
        """Versions loaded with success, in order."""
        self._policy = policy
        self._slots = slots
        self._vocabulary = vocabulary
        self._max_context = max_context
        self._end_id = end_id
        self._end_chance = end_chance
        self._tick_s = tick_s
        self._load_s = load_s
        self._versions_held = versions_held
        self._max_waiting = max_waiting
        self._before_load = before_load
        self._by_version = by_version
        self._held: list[Manifest] = []
        self._pinned: Counter[int] = Counter()
        self._gate = asyncio.Semaphore(slots)

    def info(self) -> EngineInfo:
        return EngineInfo(
            policy=self._policy,
            max_context=self._max_context,
            vocabulary=self._vocabulary,
            dtype="float32",
            versions=tuple(held.version for held in self._held),
            digests={held.version: held.digest for held in self._held},
            slots=self._slots,
            versions_held=self._versions_held,
        )

    async def start(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        room = self._max_context - len(request.tokens)
        if room < 1:
            raise BadRequest(
                f"prompt_too_long: {len(request.tokens)} tokens leave no room in a context of {self._max_context}"
            )
        if request.sampling.seed is None:
            raise BadRequest("sampling.seed must be set before the engine")
        if self.waiting >= self._max_waiting:
            raise Unavailable(f"{self.waiting} requests wait for a slot already")
        async with self._slot():
            return await self._decode(request, min(request.sampling.max_tokens, room), request.sampling.seed)

    async def load(self, manifest: Manifest, files: list[Path]) -> None:
        """The newest serial stays the newest (F84). Waits while requests that name a version keep every set busy."""
        if self._load_s:
            await asyncio.sleep(self._load_s)
        if self._before_load is not None:
            self._before_load(manifest)
        kept = self._others(manifest)
        while len(kept) >= self._versions_held:
            if self._versions_held == 1 and kept[0].serial > manifest.serial:
                return
            free = [held for held in kept if not self._pinned[held.version]]
            if free:
                kept.remove(free[0])
                continue
            await asyncio.sleep(self._tick_s)
            kept = self._others(manifest)
        self._held = sorted([*kept, manifest], key=lambda held: held.serial)
        self.loads.append(manifest.version)

    def _others(self, manifest: Manifest) -> list[Manifest]:
        """Without what it replaces: the same version, and those that it rolls back."""
        undone = [h for h in self._held if h.version > manifest.version and h.serial < manifest.serial]
        return [h for h in self._held if h.version != manifest.version and (h not in undone or self._pinned[h.version])]

    async def close(self) -> None: ...

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        self.waiting += 1
        try:
            await self._gate.acquire()
        finally:
            self.waiting -= 1
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1
            self._gate.release()

    def _weights(self, version: int | None) -> Manifest:
        for held in reversed(self._held):
            if version is None or held.version == version:
                return held
        raise NotFound(f"{self._policy}: version {version} is not held; held: {[held.version for held in self._held]}")

    async def _decode(self, request: GenerateRequest, most: int, seed: int) -> GenerateReply:
        self._weights(request.version)
        if request.version is not None:
            self._pinned[request.version] += 1
        try:
            return await self._tokens(request, most, seed)
        finally:
            if request.version is not None:
                self._pinned[request.version] -= 1

    async def _tokens(self, request: GenerateRequest, most: int, seed: int) -> GenerateReply:
        tokens: list[int] = []
        logprobs: list[float] = []
        spans: list[Span] = []
        ends = {self._end_id, *request.sampling.stop_token_ids}
        reason = StopReason.LENGTH
        while len(tokens) < most:
            await asyncio.sleep(self._tick_s)
            weights = self._weights(request.version)
            self.steps += 1
            at = len(tokens)
            token, logprob = self.token(seed, at, weights.version)
            tokens.append(token)
            logprobs.append(logprob)
            start = at
            if spans and (spans[-1].version, spans[-1].digest) == (weights.version, weights.digest):
                start = spans.pop().start
            spans.append(Span(start=start, stop=at + 1, version=weights.version, digest=weights.digest))
            if token in ends:
                reason = StopReason.STOP
                break
        return GenerateReply(
            tokens=np.array(tokens, np.int32),
            logprobs=np.array(logprobs, np.float32),
            spans=tuple(spans),
            stop_reason=reason,
        )

    def token(self, seed: int, position: int, version: int) -> tuple[int, float]:
        """What this engine samples at ``position`` of a reply, with its log-prob: tests recompute replies by it."""
        draw = uniform(seed * 1_000_003 + (version if self._by_version else 0), position)
        if draw < self._end_chance:
            return self._end_id, float(np.log(self._end_chance))
        others = self._vocabulary - 1
        index = min(int((draw - self._end_chance) / (1 - self._end_chance) * others), others - 1)
        token = index if index < self._end_id else index + 1
        return token, float(np.log((1 - self._end_chance) / others))
