"""Two corrections for an engine and a trainer that give one policy's tokens different probabilities.

Their kernels, precisions and samplers differ, so what the engine sampled is off policy even at the same weights. Each
token is weighed by w = prox / behaviour, prox the trainer's own probability at the weights that the step starts from
(``proximal_logprobs``; None: the current ones, which are the same where one batch is one step). w has no gradient.

    tis   min(w, cap)                        Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
                                             Off-Policy RL Training"; truncation: Espeholt et al. 2018, arXiv 1802.01561
    mis   w where low <= w <= high, else 0   by token: Ling Team 2025 (IcePop), arXiv 2510.18855; by sequence: Liu et
                                             al. 2025, "When Speed Kills Stability"
"""

from __future__ import annotations

import torch
from torch import Tensor

from astraflow.losses.aggregate import aggregate
from astraflow.losses.base import LossInputs, LossOutput, checked
from astraflow.losses.kl import apply_kl
from astraflow.losses.ratios import (
    MAX_LOG_RATIO,
    masked_log_ratio,
    outside_mask_zero,
    ratio_metrics,
    sequence_lengths,
    sequence_sums,
)
from astraflow.losses.surrogate import Clip, clipped_surrogate, is_flat


@checked
def tis(
    inputs: LossInputs,
    *,
    level: str = "token",
    cap: float = 2.0,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    kl: str = "k3_in_loss",
    kl_coefficient: float = 0.0,
    aggregation: str = "token_mean",
    constant: float | None = None,
) -> LossOutput:
    """Per token ``min(w, cap) max(-A u, -A clip(u, 1 - clip_low, 1 + clip_high))``, u = p / prox.

    ``level``: w of the token, or of its "sequence" (the product), or the "geometric" mean over the sequence.
    """
    weight = _weight(inputs, level)
    counted = {"loss/weight_truncated": weight > cap}
    clip = Clip.of(clip_low, clip_high)
    per_token, metrics = _weighed(inputs, weight.clamp(max=cap), clip, kl, kl_coefficient, counted)
    loss = aggregate(per_token, inputs, aggregation=aggregation, constant=constant)
    return LossOutput(loss=loss, metrics=metrics)


@checked
def mis(
    inputs: LossInputs,
    *,
    level: str = "token",
    low: float = 0.5,
    high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    kl: str = "k3_in_loss",
    kl_coefficient: float = 0.0,
    aggregation: str = "token_mean",
    constant: float | None = None,
) -> LossOutput:
    """As ``tis``, but what is outside [``low``, ``high``] is rejected: weight 0, and still in the denominators (F47).

    A token that the trainer thinks far less, or far more, likely than the engine did says nothing about the policy.
    """
    weight = _weight(inputs, level)
    rejected = (weight < low) | (weight > high)
    clip = Clip.of(clip_low, clip_high)
    kept = torch.where(rejected, 0.0, weight)
    per_token, metrics = _weighed(inputs, kept, clip, kl, kl_coefficient, {"loss/weight_rejected": rejected})
    loss = aggregate(per_token, inputs, aggregation=aggregation, constant=constant)
    return LossOutput(loss=loss, metrics=metrics)


@torch.no_grad()
def _weight(inputs: LossInputs, level: str) -> Tensor:
    """[N] prox / behaviour; 1 outside the mask."""
    if level == "token":
        return masked_log_ratio(_proximal(inputs), inputs.behaviour_logprobs, inputs.mask).exp()
    gaps = outside_mask_zero(_proximal(inputs) - inputs.behaviour_logprobs, inputs.mask)
    total = sequence_sums(gaps, inputs.sequence_ids)
    if level == "geometric":
        total = total / sequence_lengths(inputs)
    return total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _proximal(inputs: LossInputs) -> Tensor:
    return (inputs.logprobs if inputs.proximal_logprobs is None else inputs.proximal_logprobs).detach()


def _weighed(
    inputs: LossInputs, weight: Tensor, clip: Clip, kl: str, kl_coefficient: float, counted: dict[str, Tensor]
) -> tuple[Tensor, dict[str, tuple[float, float]]]:
    """Loss a token [N] and metrics. ``counted``: bool [N] of what to count."""
    inputs, penalty, metrics = apply_kl(inputs, kl=kl, kl_coefficient=kl_coefficient)
    advantages = outside_mask_zero(inputs.advantages, inputs.mask)
    ratio = masked_log_ratio(inputs.logprobs, _proximal(inputs), inputs.mask).exp()
    per_token = weight * clipped_surrogate(ratio, advantages, clip) + penalty
    count = float(inputs.mask.sum())
    found = {name: (float((where & inputs.mask).sum()), count) for name, where in counted.items()}
    found["loss/behaviour_weight"] = (float(outside_mask_zero(weight, inputs.mask).sum()), count)
    return per_token, {**ratio_metrics(inputs, is_flat(ratio, advantages, clip)), **found, **metrics}
