"""One ratio a sequence: the geometric mean of its tokens', so that what is clipped is what the reward is of.

Source: Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv 2507.18071.
"""

from __future__ import annotations

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
def gspo(
    inputs: LossInputs,
    *,
    variant: str = "sequence",
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    kl: str = "k3_in_loss",
    kl_coefficient: float = 0.0,
    aggregation: str = "sequence_mean",
    constant: float | None = None,
) -> LossOutput:
    """Per token ``max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))`` with ``s = exp(mean of the log-ratios)``.

    ``variant`` "sequence" (GSPO): the gradient of s goes to all tokens of the sequence, by the mean of their
    advantages where these differ. "token" (GSPO-token): same value, but each token's gradient is by its own advantage:
    ``s_t = sg[s] p_t / sg[p_t]``. Equal where a sequence has one advantage. The mean is over unmasked tokens (F46).
    """
    inputs, penalty, metrics = apply_kl(inputs, kl=kl, kl_coefficient=kl_coefficient)
    clip = Clip.of(clip_low, clip_high)
    advantages = outside_mask_zero(inputs.advantages, inputs.mask)
    changes = outside_mask_zero(inputs.logprobs - inputs.behaviour_logprobs, inputs.mask)
    mean = sequence_sums(changes, inputs.sequence_ids) / sequence_lengths(inputs)
    ratio = mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if variant == "token":
        own = outside_mask_zero(inputs.logprobs - inputs.logprobs.detach(), inputs.mask)
        ratio = ratio.detach() * own.exp()
    per_token = clipped_surrogate(ratio, advantages, clip) + penalty
    loss = aggregate(per_token, inputs, aggregation=aggregation, constant=constant)
    return LossOutput(loss=loss, metrics={**ratio_metrics(inputs, is_flat(ratio, advantages, clip)), **metrics})
