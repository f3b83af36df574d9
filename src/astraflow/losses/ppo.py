"""PPO for tokens: a clipped ratio, a bound for bad tokens whose ratio runs away, a KL penalty, a clipped critic.

Sources: Schulman et al. 2017, arXiv 1707.06347; Ouyang et al. 2022, "Training language models to follow instructions
with human feedback", arXiv 2203.02155 (KL in the reward); Ye et al. 2019, arXiv 1912.09729 (dual clip); Engstrom et al.
2020, "Implementation Matters in Deep Policy Gradients", arXiv 2005.12729 (value clip).
"""

from __future__ import annotations

from dataclasses import replace

from astraflow.errors import InvalidRecord
from astraflow.losses.aggregate import aggregate
from astraflow.losses.base import LossInputs, LossOutput, checked
from astraflow.losses.grpo import by_token
from astraflow.losses.surrogate import Clip
from astraflow.losses.vapo import value_errors


@checked
def ppo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    kl: str = "k1_in_reward",
    kl_coefficient: float = 0.0,
    value_coefficient: float = 0.0,
    value_clip: float | None = None,
    aggregation: str = "token_mean",
    constant: float | None = None,
) -> LossOutput:
    """Per token ``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))``, where A < 0 at most ``-A dual_clip``.

    With ``value_coefficient`` > 0 the critic's ``max((V - R)², (old + clamp(V - old, ± value_clip) - R)²) / 2`` is
    added, aggregated alike: it needs ``values``, ``old_values`` and ``returns``. Advantages are then those of ``gae``
    over rewards alone: a KL in the reward is taken off as it is paid from a token on, without a baseline of its own.
    """
    clip = Clip.of(clip_low, clip_high, dual_clip)
    output = by_token(inputs, clip, kl=kl, kl_coefficient=kl_coefficient, aggregation=aggregation, constant=constant)
    if value_coefficient == 0:
        return output
    if inputs.values is None or inputs.returns is None or inputs.old_values is None:
        raise InvalidRecord("LossInputs: ppo with value_coefficient > 0 needs values, old_values and returns")
    errors = value_errors(
        inputs.values, inputs.old_values.detach(), inputs.returns.detach(), inputs.mask, clip=value_clip
    )
    value = aggregate(errors, inputs, aggregation=aggregation, constant=constant)
    metrics = {**output.metrics, "loss/value": (float(errors.detach().sum()), float(inputs.mask.sum()))}
    return replace(output, loss=output.loss + value_coefficient * value, metrics=metrics)
