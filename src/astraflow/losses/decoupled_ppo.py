"""PPO with two old policies: one that sampled, to weigh by, and a nearer one, to stay close to.

Sources: Hilton et al. 2021, "Batch size-invariance for policy optimization", arXiv 2110.00641; Fu et al. 2025,
"AReaL", arXiv 2505.24298 (the weight cap); Li, Wu and Shen 2025, "A-3PO", arXiv 2512.06547 (the interpolation).
"""

from __future__ import annotations

import torch
from torch import Tensor

from astraflow.errors import InvalidRecord
from astraflow.losses.aggregate import aggregate
from astraflow.losses.base import LossInputs, LossOutput, checked
from astraflow.losses.ratios import masked_log_ratio, outside_mask_zero, ratio_metrics
from astraflow.losses.surrogate import Clip, clipped_surrogate, is_flat


@checked
def decoupled_ppo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    weight_cap: float = 5.0,
    recompute: bool = False,
    aggregation: str = "token_mean",
    constant: float | None = None,
) -> LossOutput:
    """Per token ``w max(-A u, -A clip(u, 1 - clip_low, 1 + clip_high))``, w = prox / behaviour, u = p / prox.

    w has no gradient; a token whose w exceeds ``weight_cap`` is rejected: no gradient, but in the denominators.
    ``prox`` is ``interpolated``, or with ``recompute`` the policy that the step starts from (``proximal_logprobs``, or
    the current one, which is the same where one batch is one step: u is 1 then, only w is left).
    """
    proximal = _recomputed(inputs) if recompute else interpolated(inputs)
    clip = Clip.of(clip_low, clip_high)
    advantages = outside_mask_zero(inputs.advantages, inputs.mask)
    ratio = masked_log_ratio(inputs.logprobs, proximal, inputs.mask).exp()
    with torch.no_grad():
        weight = masked_log_ratio(proximal, inputs.behaviour_logprobs, inputs.mask).exp()
        rejected = weight > weight_cap
        weight = torch.where(rejected, 0.0, weight)
    per_token = weight * clipped_surrogate(ratio, advantages, clip)
    loss = aggregate(per_token, inputs, aggregation=aggregation, constant=constant)
    with torch.no_grad():
        count = float(inputs.mask.sum())
        metrics = ratio_metrics(inputs, clipped=is_flat(ratio, advantages, clip))
        metrics["loss/weight_rejected"] = (float((rejected & inputs.mask).sum()), count)
        metrics["loss/behaviour_weight"] = (float(outside_mask_zero(weight, inputs.mask).sum()), count)
    return LossOutput(loss=loss, metrics=metrics)


@torch.no_grad()
def interpolated(inputs: LossInputs) -> Tensor:
    """[N] ``a behaviour + (1 - a) current`` of the log-probs, a = 1 / age; age 0: current (a = 0, F50).

    The policy of one step ago, if log-probs went straight from the one that sampled: no further pass is needed. A-3PO.
    """
    if inputs.ages is None:
        raise InvalidRecord("LossInputs.ages: decoupled_ppo interpolates by them, found None")
    ages = inputs.ages.to(inputs.logprobs.dtype)
    share = torch.where(ages > 0, 1 / ages.clamp(min=1), 0.0)
    return inputs.logprobs + share * outside_mask_zero(inputs.behaviour_logprobs - inputs.logprobs, inputs.mask)


def _recomputed(inputs: LossInputs) -> Tensor:
    return (inputs.logprobs if inputs.proximal_logprobs is None else inputs.proximal_logprobs).detach()
