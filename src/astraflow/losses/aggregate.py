"""From one loss a token to one number, by the denominators of the whole batch: equal for every split (F45, F53).

token_mean                  sum of all tokens / tokens
sequence_mean               mean over sequences of the mean over its tokens
sequence_sum_over_constant  mean over sequences of (sum over its tokens / constant)
"""

from __future__ import annotations

import torch
from torch import Tensor

from astraflow.errors import ConfigError
from astraflow.losses.base import LossInputs


def aggregate(per_token: Tensor, inputs: LossInputs, *, aggregation: str, constant: float | None = None) -> Tensor:
    """``per_token`` [N] → []. What the loss itself rejects must be 0 in it and stays in the denominators (F47)."""
    mask = inputs.mask
    kept = torch.where(mask, per_token, torch.zeros_like(per_token))  # also a NaN outside the mask is gone
    if aggregation == "token_mean":
        tokens = int(mask.sum()) if inputs.batch_tokens is None else inputs.batch_tokens
        return kept.sum() / max(1, tokens)
    present, index = torch.unique(inputs.sequence_ids, return_inverse=True)
    lengths = torch.zeros(len(present), dtype=per_token.dtype, device=per_token.device)
    lengths.index_add_(0, index, mask.to(per_token.dtype))
    sequences = int((lengths > 0).sum()) if inputs.batch_sequences is None else inputs.batch_sequences
    if aggregation == "sequence_mean":
        return (kept / lengths.clamp(min=1)[index]).sum() / max(1, sequences)
    if aggregation == "sequence_sum_over_constant":
        if constant is None or not constant > 0:
            raise ConfigError(f"aggregation {aggregation!r} needs constant > 0, found {constant}")
        return kept.sum() / (constant * max(1, sequences))
    raise ConfigError(f"aggregation {aggregation!r} is unknown")
