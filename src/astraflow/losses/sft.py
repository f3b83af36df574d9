"""Negative log-likelihood of the targets: what supervised rows take."""

from __future__ import annotations

from astraflow.losses.aggregate import aggregate
from astraflow.losses.base import LossInputs, LossOutput


def sft(
    inputs: LossInputs, *, aggregation: str = "token_mean", constant: float | None = None, **unused: object
) -> LossOutput:
    """Per token ``-advantage * logprob``; a supervised row has advantage 1. ``unused``: options of other losses."""
    loss = aggregate(-inputs.advantages * inputs.logprobs, inputs, aggregation=aggregation, constant=constant)
    masked = inputs.logprobs.detach()[inputs.mask]
    return LossOutput(loss=loss, metrics={"loss/target_logprob": (float(masked.sum()), float(len(masked)))})
