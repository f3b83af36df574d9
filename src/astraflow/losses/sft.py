"""Negative log-likelihood of the targets: what supervised rows take."""

from __future__ import annotations

from astraflow.losses.aggregate import aggregate
from astraflow.losses.base import LossInputs, LossOutput, checked
from astraflow.losses.ratios import outside_mask_zero


@checked
def sft(inputs: LossInputs, *, aggregation: str = "token_mean", constant: float | None = None) -> LossOutput:
    """Per token ``-advantage * logprob``; a supervised row has advantage 1."""
    logprobs = outside_mask_zero(inputs.logprobs, inputs.mask)
    per_token = -outside_mask_zero(inputs.advantages, inputs.mask) * logprobs
    loss = aggregate(per_token, inputs, aggregation=aggregation, constant=constant)
    masked = inputs.logprobs.detach()[inputs.mask]
    return LossOutput(loss=loss, metrics={"loss/target_logprob": (float(masked.sum()), float(len(masked)))})
