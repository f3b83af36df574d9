"""A budget on how far a batch is off policy: the mean squared log-ratio, bounded by masking the largest.

Source: Zheng, Zhao and Chen 2025, "Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on
LLMs?", arXiv 2510.01161.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from astraflow.losses.aggregate import aggregate
from astraflow.losses.base import LossInputs, LossOutput, checked, whole_batch
from astraflow.losses.ratios import masked_log_ratio, outside_mask_zero, ratio_metrics

SLACK = 1e-12
"""Relative: a mean that is the budget up to rounding is within it."""


@torch.no_grad()
def prepare(inputs: LossInputs, *, budget: float = 0.04, **_: object) -> LossInputs:
    """``kept``: False at the tokens to be masked so that the mean squared log-ratio of the others is <= ``budget``.

    Considered are the tokens on which PPO's clip would act: A > 0 and r > 1, or A < 0 and r < 1. Of these the largest
    are masked; equal ones stay or go together, so that no order of tokens can change the choice (F49).
    """
    change = outside_mask_zero(inputs.logprobs - inputs.behaviour_logprobs, inputs.mask).double()
    considered = inputs.mask & (inputs.advantages * change.sign() > 0)
    moments = change.square()
    limit = _limit(moments[considered], budget)
    return replace(inputs, kept=~considered | (moments < limit), prepared=True)


def _limit(moments: Tensor, budget: float) -> float:
    """Moments [K] below it may stay."""
    ascending = moments.sort().values
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=ascending.device)
    within = int((means <= budget * (1 + SLACK)).sum())
    return float(ascending[within]) if within < len(ascending) else float("inf")


@checked
def m2po(
    inputs: LossInputs,
    *,
    budget: float = 0.04,
    aggregation: str = "token_mean",
    constant: float | None = None,
) -> LossOutput:
    """Per token ``-A r``, unclipped; 0 where ``prepare`` has masked it, which leaves the denominators alone.

    The budget is the whole batch's, never a micro-batch's: what is masked does not depend on packing or ranks.
    """
    inputs = whole_batch(inputs, partial(prepare, budget=budget))
    assert inputs.kept is not None, "prepare fills it"
    advantages = outside_mask_zero(inputs.advantages, inputs.mask & inputs.kept)
    log_ratio = masked_log_ratio(inputs.logprobs, inputs.behaviour_logprobs, inputs.mask & inputs.kept)
    loss = aggregate(-advantages * log_ratio.exp(), inputs, aggregation=aggregation, constant=constant)
    metrics = ratio_metrics(inputs, clipped=~inputs.kept)
    left = log_ratio.detach()
    considered = left * advantages > 0
    metrics["loss/second_moment"] = (float(left[considered].square().sum()), float(considered.sum()))
    return LossOutput(loss=loss, metrics=metrics)
