"""PPO's clipped objective on group-relative advantages, which dataflow has computed."""

from __future__ import annotations

import torch

from astraflow.losses.aggregate import aggregate
from astraflow.losses.base import LossInputs, LossOutput, checked

MAX_LOG_RATIO = 20.0
"""exp overflows in fp32 at 88.7; a ratio of e^20 is far outside every clip range already."""


@checked
def grpo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    aggregation: str = "token_mean",
    constant: float | None = None,
) -> LossOutput:
    """Per token ``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))``; ``clip_high`` None: ``clip_low``.

    The log-ratio is masked and clamped BEFORE exp: masked afterwards, its gradient would be 0 * inf (F41).
    """
    high = clip_low if clip_high is None else clip_high
    raw = inputs.logprobs - inputs.behaviour_logprobs
    raw = torch.where(inputs.mask, raw, torch.zeros_like(raw))
    log_ratio = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    advantages = torch.where(inputs.mask, inputs.advantages, torch.zeros_like(inputs.advantages))
    per_token = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + high))
    loss = aggregate(per_token, inputs, aggregation=aggregation, constant=constant)
    with torch.no_grad():
        count = float(inputs.mask.sum())
        clipped = ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - clip_low))
        distance = ratio - 1 - log_ratio
        metrics = {
            "loss/clip_fraction": (float((clipped & inputs.mask).sum()), count),
            "loss/ratio_clamped": (float((raw != log_ratio).sum()), count),
            "loss/behaviour_kl": (float(torch.where(inputs.mask, distance, 0.0).sum()), count),
        }
    return LossOutput(loss=loss, metrics=metrics)
