"""Log-ratios and sums a sequence: what off-policy losses are made of, safe under exp and under every mask.

A log-ratio is masked and clamped BEFORE exp: masked afterwards, its gradient would be 0 * inf (F41). N: tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from astraflow.losses.base import LossInputs

MAX_LOG_RATIO = 20.0
"""exp overflows in fp32 at 88.7; a ratio of e^20 is far outside every clip range already."""


def outside_mask_zero(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` [N] where ``mask``, else 0: also a NaN there is gone, from the value and from the gradient (F50)."""
    return torch.where(mask, values, torch.zeros_like(values))


def masked_log_ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """[N] ``new - old`` within ± ``MAX_LOG_RATIO``; beyond it the gradient is 0."""
    return outside_mask_zero(new - old, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_sums(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """[N]: at every token, the sum of ``values`` over its sequence."""
    present, index = torch.unique(sequence_ids, return_inverse=True)
    sums = torch.zeros(len(present), dtype=values.dtype, device=values.device).index_add(0, index, values)
    return sums[index]


@torch.no_grad()
def sequence_lengths(inputs: LossInputs) -> Tensor:
    """[N], at least 1: at every token, how many unmasked tokens its sequence has."""
    return sequence_sums(inputs.mask.to(inputs.logprobs.dtype), inputs.sequence_ids).clamp(min=1)


@torch.no_grad()
def ratio_metrics(inputs: LossInputs, clipped: Tensor | None = None) -> dict[str, tuple[float, float]]:
    """How far the tokens are from what sampled them; ``clipped`` bool [N]: those on which the clip acts."""
    mask, count = inputs.mask, float(inputs.mask.sum())
    raw = outside_mask_zero(inputs.logprobs - inputs.behaviour_logprobs, mask)
    log_ratio = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    found = {
        "loss/ratio_clamped": (float((raw != log_ratio).sum()), count),
        "loss/behaviour_kl": (float((log_ratio.exp() - 1 - log_ratio).sum()), count),
    }
    if clipped is not None:
        found["loss/clip_fraction"] = (float((clipped & mask).sum()), count)
    return found
