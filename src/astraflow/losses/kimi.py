"""Policy mirror descent as a regression of log-ratios on rewards.

Source: Kimi Team 2025, "Kimi k1.5: Scaling Reinforcement Learning with LLMs", arXiv 2501.12599, section 2.3. Its
length reward is a matter of credit: ``algorithms.credit_shapes.ShorterIsBetter``.
"""

from __future__ import annotations

from astraflow.losses.aggregate import aggregate
from astraflow.losses.base import LossInputs, LossOutput, checked
from astraflow.losses.ratios import outside_mask_zero, ratio_metrics, sequence_lengths, sequence_sums


@checked
def kimi(
    inputs: LossInputs,
    *,
    tau: float = 0.1,
    aggregation: str = "sequence_sum_over_constant",
    constant: float | None = 1.0,
) -> LossOutput:
    """Per sequence ``-sum(A_t d_t) + tau / 2 * D^2``, d_t the token's log-ratio to what sampled it, D its sum.

    The paper's ``(r - tau log Z - tau D)^2`` with tau log Z taken as the mean reward of the group, divided by 2 tau,
    without the part that has no gradient; so tau = 0 is plain REINFORCE. Its gradient is the paper's:
    ``-A grad(log p) + tau / 2 grad(D^2)``. A is the reward less the group's mean: ``GroupMean(std=False)``.
    tau asks for a KL towards the policy that sampled: with equal rewards it alone is left, 0 on policy.
    The mean is over sequences: ``sequence_sum_over_constant`` with constant 1. Nothing is exponentiated or clamped.
    """
    advantages = outside_mask_zero(inputs.advantages, inputs.mask)
    change = outside_mask_zero(inputs.logprobs - inputs.behaviour_logprobs, inputs.mask)
    total = sequence_sums(change, inputs.sequence_ids)
    per_token = -advantages * change + tau / 2 * total.square() / sequence_lengths(inputs)
    loss = aggregate(per_token, inputs, aggregation=aggregation, constant=constant)
    spread = outside_mask_zero(total.detach().square() / sequence_lengths(inputs), inputs.mask)
    metrics = ratio_metrics(inputs)
    metrics["loss/squared_log_ratio"] = (float(spread.sum()), float(inputs.mask.sum()))
    return LossOutput(loss=loss, metrics=metrics)
