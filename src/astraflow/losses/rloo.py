"""REINFORCE over whole answers. The baseline is the mean of the others in the group, by the recipe's ``credit``:
``GroupMean(std=False, leave_one_out=True)``.

Source: Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback
in LLMs", arXiv 2402.14740 (after Kool et al. 2019).
"""

from __future__ import annotations

import torch

from astraflow.losses.aggregate import aggregate
from astraflow.losses.base import LossInputs, LossOutput, checked
from astraflow.losses.kl import apply_kl
from astraflow.losses.ratios import (
    MAX_LOG_RATIO,
    outside_mask_zero,
    ratio_metrics,
    sequence_lengths,
    sequence_sums,
)
from astraflow.losses.surrogate import Clip, clipped_surrogate, is_flat


@checked
def rloo(
    inputs: LossInputs,
    *,
    ratio: str = "none",
    clip_low: float = 0.2,
    clip_high: float | None = None,
    kl: str = "k1_in_reward",
    kl_coefficient: float = 0.0,
    aggregation: str = "sequence_sum_over_constant",
    constant: float | None = 1.0,
) -> LossOutput:
    """Mean over sequences of ``-A log p(sequence)``: per token ``-A log p``, summed over the sequence.

    ``ratio`` "none" is the paper's: right on policy, and biased by as much as the sampling policy is behind.
    "sequence" takes PPO's clip of the sequence's whole ratio: ``max(-A R, -A clip(R))``, R the product over its tokens,
    A their mean advantage; the clip acts on a sum of log-ratios, so long answers are soon flat.
    """
    inputs, penalty, metrics = apply_kl(inputs, kl=kl, kl_coefficient=kl_coefficient)
    advantages = outside_mask_zero(inputs.advantages, inputs.mask)
    if ratio == "none":
        per_token = -advantages * outside_mask_zero(inputs.logprobs, inputs.mask)
        flat = torch.zeros_like(inputs.mask)
    else:
        clip = Clip.of(clip_low, clip_high)
        share = 1 / sequence_lengths(inputs)  # the sequence's loss, spread over its tokens: their sum is what counts
        changes = outside_mask_zero(inputs.logprobs - inputs.behaviour_logprobs, inputs.mask)
        whole = sequence_sums(changes, inputs.sequence_ids).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        mean = sequence_sums(advantages, inputs.sequence_ids) * share
        per_token = clipped_surrogate(whole, mean, clip) * share
        flat = is_flat(whole, mean, clip)
    loss = aggregate(per_token + penalty, inputs, aggregation=aggregation, constant=constant)
    return LossOutput(loss=loss, metrics={**ratio_metrics(inputs, flat), **metrics})
