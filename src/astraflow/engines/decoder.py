"""Continuous batching: which rows the next forward pass computes, and what becomes of its logits.

Plain synchronous code, owned by one thread. A step takes every sequence that can sample, beside up to ``prefill_chunk``
prompt tokens of those that cannot yet; then ends what has ended and fills the free slots, first come first served.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from astraflow.engines.draws import uniform
from astraflow.engines.prefixes import Prefixes
from astraflow.engines.rows import Model, Rows, Segment
from astraflow.engines.sampling import Draw, sample
from astraflow.engines.sequence import Held, Sequence, TextOf
from astraflow.engines.settings import EngineSettings
from astraflow.errors import NotFound, WeightsRefused

_WORTH_WAITING = 8
"""Prompt tokens that a step of waiting must save."""
_PIN_LINGERS_S = 60.0
"""A version that was named so recently is dropped only if there is no other choice."""


class Decoder:
    def __init__(self, model: Model, settings: EngineSettings, *, text_of: TextOf, now: Callable[[], float]) -> None:
        self.held: list[Held] = []
        """By serial; the last one is the newest."""
        self.steps = 0
        self.prefilled = 0
        """Prompt tokens computed so far."""
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In the order in which they took their slots."""
        self._model = model
        self._settings = settings
        self._text_of = text_of
        self._now = now
        self._free = list(range(settings.slots))
        self._prefixes = Prefixes(model, slots=settings.slots, budget=settings.prefix_cache)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    # ── weights ──

    def swap(self, new: Held) -> bool:
        """Take the new set between two steps, also in place of one that says it is the same. False: every set that
        could go is named by a running request."""
        if self._settings.versions_held == 1 and self.held and self.held[-1].serial > new.serial:
            return True
        # A lower version with a newer serial is a rollback: what came after it will be made again, with other bits.
        undone = [held for held in self.held if held.version > new.version and held.serial < new.serial]
        again = [held for held in self.held if held.version == new.version]
        for held in [held for held in (*undone, *again) if not held.pins]:
            self._drop(held)
        while len(self.held) >= self._settings.versions_held:
            free = [held for held in self.held if not held.pins]
            if not free:
                return False
            now = self._now()
            self._drop(min(free, key=lambda held: (self._lingers(held, now), held.serial)))
        self.held = sorted([*self.held, new], key=lambda held: held.serial)
        for sequence in self.running:
            if sequence.request.version is None and sequence.held is not self.held[-1]:
                self._move(sequence, self.held[-1])
        return True

    def _move(self, sequence: Sequence, newest: Held) -> None:
        """A running sequence goes on under other weights. One that has sampled nothing starts its prompt again."""
        sequence.held = newest
        sequence.waits_for = None
        self._prefixes.spoil(sequence.slot)
        if self._settings.kv_on_update == "recompute" or not sequence.logprobs:
            sequence.cached = 0
            self._model.forget(sequence.slot)
            self._prefixes.claim(sequence.slot, newest)

    def _lingers(self, held: Held, now: float) -> float:
        return held.named_at if held.named_at and now - held.named_at < _PIN_LINGERS_S else 0.0

    def _drop(self, held: Held) -> None:
        self.held.remove(held)
        self._prefixes.drop(held)

    def find(self, version: int | None) -> Held:
        """Raises NotFound."""
        for held in reversed(self.held):
            if version is None or held.version == version:
                return held
        raise NotFound(f"version {version} is not held; held: {[held.version for held in self.held]}")

    # ── requests ──

    def submit(self, sequence: Sequence) -> None:
        """What is scored comes first: replies may wait for what it says about the weights."""
        if sequence.given:
            self.waiting.appendleft(sequence)
        else:
            self.waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Its slot is free before the next step; cancelling twice, or after the end, changes nothing."""
        if sequence.cancelled:
            return
        sequence.cancelled = True
        if sequence in self.running:
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def fail_all(self, error: Exception) -> None:
        for sequence in [*self.running, *self.waiting]:
            self.cancel(sequence)
            sequence.done(error)

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free.append(sequence.slot)
        if sequence.request.version is not None and sequence.held is not None:
            sequence.held.pins -= 1

    def _admit(self) -> None:
        while self.waiting and self._free:
            sequence = self.waiting.popleft()
            try:
                sequence.held = self.find(sequence.request.version)
            except NotFound as error:
                sequence.done(error)
                continue
            if sequence.request.version is not None:
                sequence.held.pins += 1
                sequence.held.named_at = self._now()
            sequence.tokens = sequence.request.tokens.tolist()
            sequence.slot = self._prefixes.choose(self._free, sequence.request.tokens, sequence.held)
            self._free.remove(sequence.slot)
            self._prefixes.open(sequence)
            self.running.append(sequence)

    # ── the step ──

    @torch.inference_mode()
    def step(self) -> int:
        """Returns how many rows were computed."""
        self._admit()
        rows = 0
        for held in list(self.held):
            mine = [sequence for sequence in self.running if sequence.held is held]
            if mine:
                rows += self._step(held, mine)
        return rows

    def _step(self, held: Held, mine: list[Sequence]) -> int:
        chosen = self._choose(mine)
        if not chosen:
            return 0
        chosen.sort(key=lambda pair: (pair[1] > 1, pair[0].slot))
        tokens = [token for sequence, count in chosen for token in _next(sequence, count)]
        rows = Rows(
            tokens=np.array(tokens, np.int64),
            segments=tuple(Segment(sequence.slot, sequence.cached, count) for sequence, count in chosen),
            wanted=tuple(count == sequence.remaining for sequence, count in chosen),
        )
        logits = self._model.forward(held.weights, rows)
        self.steps += 1
        ready = [sequence for (sequence, _), wanted in zip(chosen, rows.wanted, strict=True) if wanted]
        for sequence, count in chosen:
            self.prefilled += max(0, min(count, sequence.prompt_length - sequence.cached))
            sequence.cached += count
            self._prefixes.extend(sequence)
        if ready:
            sampled = sample(logits, [_draw(sequence) for sequence in ready])
            for sequence, token, logprob in zip(ready, *sampled, strict=True):
                self._take(sequence, token, logprob)
        return len(tokens)

    def _choose(self, mine: list[Sequence]) -> list[tuple[Sequence, int]]:
        """Sequences and how many of their tokens this step computes."""
        chosen = []
        budget = self._settings.prefill_chunk
        for sequence in mine:
            if sequence.cached < sequence.prompt_length - 1 and not sequence.logprobs:
                self._share(sequence)
            if sequence.waits_for is not None:
                continue
            count = sequence.remaining
            if count > 1:
                count = min(count, budget)
                budget -= count
            if count:
                chosen.append((sequence, count))
        return chosen

    def _share(self, sequence: Sequence) -> None:
        """Copy the longest prefix that another slot has computed; wait for one that is being computed, if longer."""
        leader = sequence.waits_for
        if leader is not None and leader in self.running and leader.held is sequence.held:
            ready = leader.cached >= sequence.waits_until
            if not ready:
                return
        found = self._prefixes.leader(sequence, self.running)
        if found is not None and found[1] >= self._prefixes.reach(sequence) + _WORTH_WAITING:
            sequence.waits_for, sequence.waits_until = found
            return
        sequence.waits_for = None
        self._prefixes.fill(sequence)

    def _take(self, sequence: Sequence, token: int, logprob: float) -> None:
        if not math.isfinite(logprob):
            assert sequence.held is not None
            self.cancel(sequence)
            sequence.done(WeightsRefused(f"version {sequence.held.version} gives logits that are not finite"))
            return
        reason = sequence.take(token, logprob, self._text_of)
        if reason is not None:
            self._prefixes.settle(sequence, reason)
            self._release(sequence)
            sequence.done(sequence.reply(reason))


def _next(sequence: Sequence, count: int) -> list[int]:
    return sequence.tokens[sequence.cached : sequence.cached + count]


def _draw(sequence: Sequence) -> Draw:
    sampling = sequence.request.sampling
    assert sampling.seed is not None
    return Draw(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        uniform=uniform(sampling.seed, sequence.sampled),
        given=sequence.given[sequence.sampled] if sequence.given else None,
    )
