"""What the slots remember, so that a prompt computes only what no other sequence has computed before.

The slots are the cache: a slot knows the tokens whose keys and values it holds, and by which weight set. Nothing is
ever shared between weight sets, and a slot that ran through an update belongs to none.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from astraflow.engines.rows import Model
from astraflow.engines.sequence import Held, Sequence
from astraflow.types import Array, StopReason

_WORTH_SAVING = 16
"""Shorter remains of a sequence are cheaper to compute than to keep."""


@dataclass(frozen=True, slots=True, eq=False)
class _Saved:
    held: Held
    tokens: Array
    past: Any


class Prefixes:
    def __init__(self, model: Model, *, slots: int, budget: int) -> None:
        self._model = model
        self._copies = model.copies
        self._budget = budget
        self._tokens = np.full((slots, 64), -1, np.int32)
        """Per slot the tokens that it holds; -1 beyond them, which equals no token."""
        self._owner: list[Held | None] = [None] * slots
        self._goes_on = [False] * slots
        """Whether a later prompt is likely to begin with all that the slot holds."""
        self._saved: OrderedDict[int, _Saved] = OrderedDict()
        self._next_key = 0

    # ── what happens to a slot ──

    def open(self, sequence: Sequence) -> None:
        """The sequence takes its slot: what it holds of the prompt stays, the rest is saved or forgotten."""
        slot = sequence.slot
        prompt = sequence.request.tokens
        if self._copies is None:
            self._model.forget(slot)
            return
        same = self._owner[slot] is sequence.held
        keep = min(_common(self._tokens[slot], prompt), len(prompt) - 1) if same else 0
        self._save(slot, beyond=keep)
        self._goes_on[slot] = False
        if not keep:
            self._model.forget(slot)
        self._owner[slot] = sequence.held
        self._tokens[slot, keep:] = -1
        sequence.cached = keep

    def extend(self, sequence: Sequence) -> None:
        """Tokens up to ``sequence.cached`` are in the slot now."""
        if self._copies is None:
            return
        known = self._tokens[sequence.slot]
        if sequence.cached > len(known):
            room = max(2 * self._tokens.shape[1], sequence.cached)
            grown = np.full((len(self._owner), room), -1, np.int32)
            grown[:, : self._tokens.shape[1]] = self._tokens
            self._tokens = grown
            known = grown[sequence.slot]
        at = sequence.cached
        start = at
        while start and known[start - 1] == -1:
            start -= 1
        known[start:at] = sequence.tokens[start:at]

    def spoil(self, slot: int) -> None:
        """Its sequence goes on under other weights: the past is of no single version."""
        self._owner[slot] = None
        self._tokens[slot] = -1

    def settle(self, sequence: Sequence, reason: StopReason) -> None:
        """The sequence has ended. A conversation goes on only after a reply that ended by itself."""
        self._goes_on[sequence.slot] = reason is StopReason.STOP

    def claim(self, slot: int, held: Held) -> None:
        """From here on the slot is filled by this weight set alone."""
        self._owner[slot] = held

    def drop(self, held: Held) -> None:
        """The weight set is gone, and with it all that it computed."""
        for slot, owner in enumerate(self._owner):
            if owner is held:
                self.spoil(slot)
        for key in [key for key, saved in self._saved.items() if saved.held is held]:
            del self._saved[key]

    # ── what a prompt can take over ──

    def choose(self, free: list[int], prompt: Array, held: Held) -> int:
        """Which free slot a prompt takes: the one that it continues, else one that nobody can use, else the oldest."""
        if self._copies is None:
            return free[0]
        common = self._common(prompt)
        best = max(free, key=lambda slot: common[slot] if self._owner[slot] is held else 0)
        if self._owner[best] is held and 2 * common[best] > self._length(best) > 0:
            return best
        return next((slot for slot in sorted(free) if self._owner[slot] is not held), free[0])

    def leader(self, sequence: Sequence, running: list[Sequence]) -> tuple[Sequence, int] | None:
        """An earlier sequence that is computing the longest prefix in common, and how long that is."""
        if self._copies is None:
            return None
        best: tuple[Sequence, int] | None = None
        for other in running:
            if other is sequence:
                break
            if other.held is sequence.held and other.cached < other.prompt_length - 1 and not other.logprobs:
                common = min(_common(other.request.tokens, sequence.request.tokens), sequence.prompt_length - 1)
                if common > other.cached and (best is None or common > best[1]):
                    best = (other, common)
        return best

    def fill(self, sequence: Sequence) -> None:
        """Copy the longest known prefix of the prompt into the sequence's slot, if that is more than it has."""
        source, length = self._best(sequence)
        if self._copies is None or length <= sequence.cached:
            return
        if isinstance(source, int):
            self._copies.copy_prefix(source, sequence.slot, length)
        elif source is not None:
            self._copies.restore_prefix(source.past, sequence.slot, length)
        sequence.cached = length
        self.extend(sequence)

    def reach(self, sequence: Sequence) -> int:
        """How many tokens of its prompt are known somewhere."""
        return max(sequence.cached, self._best(sequence)[1])

    def _best(self, sequence: Sequence) -> tuple[int | _Saved | None, int]:
        if self._copies is None:
            return None, 0
        prompt, most = sequence.request.tokens, sequence.prompt_length - 1
        source: int | _Saved | None = None
        length = 0
        for slot, common in enumerate(self._common(prompt).tolist()):
            if common > length and self._owner[slot] is sequence.held and slot != sequence.slot:
                source, length = slot, common
        for key, saved in self._saved.items():
            common = _common(saved.tokens, prompt) if saved.held is sequence.held else 0
            if common > length:
                source, length = saved, common
                self._saved.move_to_end(key)
                break
        return source, min(length, most)

    def _common(self, prompt: Array) -> Array:
        """int [slots]: length of the prefix that each slot's tokens share with the prompt."""
        width = min(self._tokens.shape[1], len(prompt))
        differ = self._tokens[:, :width] != prompt[None, :width]
        return np.where(differ.any(axis=1), differ.argmax(axis=1), width)

    def _length(self, slot: int) -> int:
        empty = self._tokens[slot] == -1
        return int(empty.argmax()) if empty.any() else self._tokens.shape[1]

    def _save(self, slot: int, *, beyond: int) -> None:
        """Keep a copy of what the slot holds, within the budget, the least recently used going first."""
        held, length = self._owner[slot], self._length(slot)
        if (
            self._copies is None
            or held is None
            or not self._goes_on[slot]
            or length > self._budget
            or length < beyond + _WORTH_SAVING
        ):
            return
        others = self._common(self._tokens[slot, :length])
        others[slot] = 0
        if others.max() >= length:
            return
        tokens = self._tokens[slot, :length].copy()
        self._saved[self._next_key] = _Saved(held, tokens, self._copies.save_prefix(slot, length))
        self._next_key += 1
        total = sum(len(saved.tokens) for saved in self._saved.values())
        while total > self._budget:
            total -= len(self._saved.popitem(last=False)[1].tokens)


def _common(a: Array, b: Array) -> int:
    """Length of the common prefix."""
    width = min(len(a), len(b))
    differ = a[:width] != b[:width]
    return int(differ.argmax()) if differ.any() else width
