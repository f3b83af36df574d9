"""REINFORCE with a clipped weight: no token loses its gradient, however far its ratio went.

Source: MiniMax 2025, "MiniMax-M1", arXiv 2506.13585; the cap of 5: Khatri et al. 2025, "The Art of Scaling
Reinforcement Learning Compute for LLMs", arXiv 2510.13786.
"""

from __future__ import annotations

import torch

from astraflow.losses.aggregate import aggregate
from astraflow.losses.base import LossInputs, LossOutput, checked
from astraflow.losses.kl import apply_kl
from astraflow.losses.ratios import masked_log_ratio, outside_mask_zero, ratio_metrics


@checked
def cispo(
    inputs: LossInputs,
    *,
    clip_low: float | None = None,
    clip_high: float = 4.0,
    kl: str = "k3_in_loss",
    kl_coefficient: float = 0.0,
    aggregation: str = "token_mean",
    constant: float | None = None,
) -> LossOutput:
    """Per token ``-sg[clip(r, 1 - clip_low, 1 + clip_high)] A log p``; ``clip_low`` None: no lower bound.

    The weight has no gradient (F48): it scales the token's own, and where it is clipped it still does.
    """
    inputs, penalty, metrics = apply_kl(inputs, kl=kl, kl_coefficient=kl_coefficient)
    low = 0.0 if clip_low is None else 1 - clip_low
    advantages = outside_mask_zero(inputs.advantages, inputs.mask)
    with torch.no_grad():
        ratio = masked_log_ratio(inputs.logprobs, inputs.behaviour_logprobs, inputs.mask).exp()
        weight = ratio.clamp(low, 1 + clip_high)
    per_token = -weight * advantages * outside_mask_zero(inputs.logprobs, inputs.mask) + penalty
    loss = aggregate(per_token, inputs, aggregation=aggregation, constant=constant)
    return LossOutput(loss=loss, metrics={**ratio_metrics(inputs, weight != ratio), **metrics})
