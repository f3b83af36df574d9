"""Tapered off-policy REINFORCE: good sequences as in supervised learning, bad ones only while they are likely.

Source: Le Roux et al. 2025, "Tapered Off-Policy REINFORCE", arXiv 2503.14286.
"""

from __future__ import annotations

import torch

from astraflow.losses.aggregate import aggregate
from astraflow.losses.base import LossInputs, LossOutput, checked
from astraflow.losses.ratios import MAX_LOG_RATIO, outside_mask_zero, ratio_metrics, sequence_sums


@checked
def topr(
    inputs: LossInputs,
    *,
    negative_cap: float = 1.0,
    aggregation: str = "sequence_sum_over_constant",
    constant: float | None = 1.0,
) -> LossOutput:
    """Per token ``-w A log p``; w = 1 where A >= 0, else ``min(negative_cap, R)``, without a gradient.

    R is the ratio of the whole sequence, the product over its tokens: a bad sequence that the policy has unlearnt is
    pushed no further, which is what makes plain REINFORCE diverge off policy, and a good one is learnt at full weight
    however unlikely it has become. The paper sums log p over a sequence and takes the mean over sequences: that is
    ``sequence_sum_over_constant`` with constant 1. Rewards in it stand for advantages here; the paper finds the
    baseline to decide the effective share of good examples.
    """
    advantages = outside_mask_zero(inputs.advantages, inputs.mask)
    with torch.no_grad():
        change = outside_mask_zero(inputs.logprobs - inputs.behaviour_logprobs, inputs.mask)
        total = sequence_sums(change, inputs.sequence_ids).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        weight = torch.where(advantages < 0, total.exp().clamp(max=negative_cap), 1.0)
        negative = (advantages < 0) & inputs.mask
    logprobs = outside_mask_zero(inputs.logprobs, inputs.mask)
    loss = aggregate(-weight * advantages * logprobs, inputs, aggregation=aggregation, constant=constant)
    metrics = ratio_metrics(inputs)
    metrics["loss/negative_weight"] = (float(weight[negative].sum()), float(negative.sum()))
    return LossOutput(loss=loss, metrics=metrics)
