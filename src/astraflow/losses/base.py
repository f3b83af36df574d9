"""What a loss sees and what it answers: packed 1-D tensors over tokens, no padding, no model.

A loss is a pure function ``loss(inputs, **options) -> LossOutput``. It may be called on parts of a batch: the
denominators are those of the whole batch, so that the sum over the parts is the loss of the batch. N: tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from astraflow.errors import InvalidRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """One value a token, all of one length. Only ``logprobs`` has a gradient."""

    logprobs: Tensor
    """[N] current log-probs of the tokens that were sampled (rl) or are targets (supervised)."""
    behaviour_logprobs: Tensor
    """[N] log-probs under the policy that sampled them; 0 if supervised."""
    advantages: Tensor
    """[N]"""
    mask: Tensor
    """bool [N]: False where *data* masks the token (stale, truncated, failed, not sampled): not in a denominator."""
    sequence_ids: Tensor
    """int64 [N]: which sequence a token is of; a sequence is never split over two calls."""
    batch_tokens: int | None = None
    """Unmasked tokens of the whole batch; None: these inputs are the whole batch."""
    batch_sequences: int | None = None
    """Sequences with at least one unmasked token in the whole batch; None as above."""
    proximal_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    values: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.logprobs.shape
        columns = (self.behaviour_logprobs, self.advantages, self.mask, self.sequence_ids)
        optional = (self.proximal_logprobs, self.reference_logprobs, self.values, self.old_values, self.returns)
        if len(shape) != 1 or any(each is not None and each.shape != shape for each in (*columns, *optional)):
            raise InvalidRecord(f"LossInputs: every tensor must be [N] of one N, found logprobs {list(shape)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """``loss`` is this part's share of the batch's loss; metrics can be added up over parts (F106)."""

    loss: Tensor
    """[] with a gradient; exactly 0 where there is nothing to train."""
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    """name → (sum, count)"""


class Loss(Protocol):
    def __call__(self, inputs: LossInputs, **options: object) -> LossOutput: ...
