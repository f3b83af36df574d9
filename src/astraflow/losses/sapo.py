"""Soft adaptive policy optimisation: a smooth gate instead of a clip.

Source: Gao et al. 2025, "Soft Adaptive Policy Optimization", arXiv 2511.20347.
"""

from __future__ import annotations

import torch

from astraflow.losses.aggregate import aggregate
from astraflow.losses.base import LossInputs, LossOutput, checked
from astraflow.losses.ratios import masked_log_ratio, outside_mask_zero, ratio_metrics

CLOSED = 0.5
"""A token whose gate passes less than half of its gradient at ratio 1 is counted as clipped."""


@checked
def sapo(
    inputs: LossInputs,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
    aggregation: str = "sequence_mean",
    constant: float | None = None,
) -> LossOutput:
    """Per token ``-A * sigmoid(t * (r - 1)) * 4 / t``, t by the sign of A (0 counts as negative).

    The gradient is that of ``-A r`` at r = 1 and fades on both sides, the faster the larger t is: by
    ``4 p (1 - p)``, p the sigmoid. Negative advantages raise the logits of tokens that were never sampled, so that
    theirs fade a little faster. The paper's mean is over the tokens of a sequence, then over sequences.
    """
    advantages = outside_mask_zero(inputs.advantages, inputs.mask)
    ratio = masked_log_ratio(inputs.logprobs, inputs.behaviour_logprobs, inputs.mask).exp()
    positive, negative = ratio.new_tensor(temperature_positive), ratio.new_tensor(temperature_negative)
    temperature = torch.where(advantages > 0, positive, negative)
    gate = torch.sigmoid(temperature * (ratio - 1))
    loss = aggregate(-advantages * gate * 4 / temperature, inputs, aggregation=aggregation, constant=constant)
    passed = (4 * gate * (1 - gate)).detach()
    metrics = ratio_metrics(inputs, clipped=(passed < CLOSED) & (advantages != 0))
    metrics["loss/gate"] = (float(outside_mask_zero(passed, inputs.mask).sum()), float(inputs.mask.sum()))
    return LossOutput(loss=loss, metrics=metrics)
