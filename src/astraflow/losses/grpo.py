"""PPO's clipped objective on group-relative advantages, which dataflow has computed, and two corrections of it.

    grpo       (R - mean) / deviation      token or sequence mean      KL to the reference
    dr_grpo     R - mean                   sum over a constant         longer wrong answers are not let off
    dapo       (R - mean) / deviation      token mean                  a higher upper clip lets rare tokens grow

The advantages are the recipe's ``credit``: ``GroupMean()``, or ``GroupMean(std=False)`` for dr_grpo.
"""

from __future__ import annotations

from astraflow.losses.aggregate import aggregate
from astraflow.losses.base import LossInputs, LossOutput, checked
from astraflow.losses.kl import apply_kl
from astraflow.losses.ratios import masked_log_ratio, outside_mask_zero, ratio_metrics
from astraflow.losses.surrogate import Clip, clipped_surrogate, is_flat


@checked
def grpo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    kl: str = "k3_in_loss",
    kl_coefficient: float = 0.0,
    aggregation: str = "token_mean",
    constant: float | None = None,
) -> LossOutput:
    """Per token ``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) + kl_coefficient k3``; ``clip_high`` None:
    ``clip_low``. Shao et al. 2024, "DeepSeekMath", arXiv 2402.03300, where the aggregation is ``sequence_mean``.

    The log-ratio is masked and clamped BEFORE exp: masked afterwards, its gradient would be 0 * inf (F41).
    """
    clip = Clip.of(clip_low, clip_high)
    return by_token(inputs, clip, kl=kl, kl_coefficient=kl_coefficient, aggregation=aggregation, constant=constant)


@checked
def dr_grpo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    kl: str = "k3_in_loss",
    kl_coefficient: float = 0.0,
    aggregation: str = "sequence_sum_over_constant",
    constant: float | None = None,
) -> LossOutput:
    """``grpo``'s terms, summed over each sequence and divided by ``constant``, the same for all of them.

    Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv 2503.20783: a mean by sequence weighs a long wrong
    answer's tokens less. ``constant``: the longest reply that is allowed.
    """
    clip = Clip.of(clip_low, clip_high)
    return by_token(inputs, clip, kl=kl, kl_coefficient=kl_coefficient, aggregation=aggregation, constant=constant)


@checked
def dapo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    kl: str = "k3_in_loss",
    kl_coefficient: float = 0.0,
    aggregation: str = "token_mean",
    constant: float | None = None,
) -> LossOutput:
    """``grpo``'s terms with a higher upper clip, every token of the batch weighing the same.

    Yu et al. 2025, "DAPO", arXiv 2503.14476. Its other parts: ``algorithms.keep.DropZeroVariance`` (dynamic sampling)
    and ``rewards.overlong.SoftOverlong``.
    """
    clip = Clip.of(clip_low, clip_high)
    return by_token(inputs, clip, kl=kl, kl_coefficient=kl_coefficient, aggregation=aggregation, constant=constant)


def by_token(
    inputs: LossInputs, clip: Clip, *, kl: str, kl_coefficient: float, aggregation: str, constant: float | None
) -> LossOutput:
    """The clipped surrogate of each token's own ratio, and the KL term."""
    inputs, penalty, metrics = apply_kl(inputs, kl=kl, kl_coefficient=kl_coefficient)
    ratio = masked_log_ratio(inputs.logprobs, inputs.behaviour_logprobs, inputs.mask).exp()
    advantages = outside_mask_zero(inputs.advantages, inputs.mask)
    per_token = clipped_surrogate(ratio, advantages, clip) + penalty
    loss = aggregate(per_token, inputs, aggregation=aggregation, constant=constant)
    return LossOutput(loss=loss, metrics={**ratio_metrics(inputs, is_flat(ratio, advantages, clip)), **metrics})
