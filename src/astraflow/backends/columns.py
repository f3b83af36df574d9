"""What a loss gets of a packed row, and what it may ask for first: a look at the whole batch.

    packs ─ current log-probs, without a gradient ─► the whole batch ─ the loss's ``prepare`` ─► columns for every pack

A loss without a ``prepare`` costs no further pass, one that needs the reference policy one over its weights, one with
a critic one over the critic's: its values make the advantages, before anything is prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from astraflow.losses.base import LossInputs
from astraflow.losses.choose import Chosen
from astraflow.losses.whole import joined, parted
from astraflow.trainer.packing import PackedRow
from astraflow.trainer.pairing import pair_numbers
from astraflow.trainer.trajectories import Trajectories
from astraflow.types import Array, Batch

Score = Callable[[PackedRow], Tensor]
"""Packed row → float32 [N] log-probs without a gradient."""


class Judge(Protocol):
    """``backends.critic.Critic``, before it learns from the batch."""

    def values(self, packed: PackedRow) -> Tensor:
        """float32 [N] without a gradient."""

    def estimated(self, whole: LossInputs, rewards: Tensor, trajectories: Trajectories) -> LossInputs:
        """With advantages and returns in it; ``rewards`` [N]: what each token earned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Of one batch."""

    batch: Batch
    pairs: Array
    """int64 [rows]: ``pair_numbers``."""
    device: torch.device

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> Columns:
        return cls(batch=batch, pairs=pair_numbers(batch.rows), device=device)

    def inputs(self, packed: PackedRow, logprobs: Tensor, *, supervised: bool = False) -> LossInputs:
        """Of the rows of one kind. ``logprobs`` [N]: of all kinds."""
        chosen = packed.supervised == supervised
        sequence, versions = packed.sequence[chosen], packed.versions[chosen]
        return LossInputs(
            logprobs=logprobs[self._to(chosen)],
            behaviour_logprobs=self._to(packed.logprobs[chosen]),
            advantages=self._to(packed.advantages[chosen]),
            mask=torch.ones(len(sequence), dtype=torch.bool, device=self.device),
            sequence_ids=self._to(sequence),
            batch_tokens=self.batch.tokens,
            batch_sequences=self.batch.sequences,
            ages=self._to((self.batch.version - versions).clip(min=0)),
            pairs=self._to(self.pairs[sequence]),
        )

    def prepared(
        self,
        packs: Sequence[PackedRow],
        loss: Chosen,
        options: dict[str, Any],
        *,
        current: Score,
        reference: Score | None,
        critic: Judge | None = None,
    ) -> list[LossInputs] | None:
        """For the ``rl`` rows of each pack, what the loss decides over all of them; None: it wants nothing."""
        if loss.prepare is None and reference is None and critic is None:
            return None
        parts = []
        for packed in packs:
            logprobs = current(packed) if loss.prepare is not None else self._to(packed.logprobs)
            part = self.inputs(packed, logprobs)
            if reference is not None:
                rl = self._to(~packed.supervised)
                part = replace(part, reference_logprobs=reference(packed)[rl].to(self.device))
            if critic is not None:
                values = critic.values(packed)[self._to(~packed.supervised)]
                part = replace(part, values=values, old_values=values)
            parts.append(part)
        if critic is not None:
            rewards = torch.cat([self._to(packed.rewards[~packed.supervised]) for packed in packs])
            parts = parted(critic.estimated(joined(parts), rewards, Trajectories.of(self.batch.rows)), parts)
        return parts if loss.prepare is None else parted(loss.prepare(joined(parts), **options), parts)

    def gap(self, packed: PackedRow, logprobs: Tensor) -> tuple[float, float]:
        """(sum, count) of |trainer - engine| over tokens that were sampled by the weights that the step starts from."""
        same = self._to(packed.versions == self.batch.version)
        apart = (logprobs.detach() - self._to(packed.logprobs))[same].abs()
        return float(apart.sum()), float(len(apart))

    def _to(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self.device)
