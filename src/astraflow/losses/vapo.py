"""PPO with a critic made for long answers, and the critic's own loss.

Source: Yue et al. 2025, "VAPO", arXiv 2504.05118. Its advantages are ``gae`` with ``length_adaptive_lambda``, its
returns ``returns_of`` (lambda = 1 for the critic): the trainer makes both (``backends.critic``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from astraflow.errors import InvalidRecord
from astraflow.losses.aggregate import aggregate
from astraflow.losses.base import LossInputs, LossOutput, checked, whole_batch
from astraflow.losses.ratios import masked_log_ratio, outside_mask_zero, ratio_metrics
from astraflow.losses.surrogate import Clip, clipped_surrogate, is_flat


@checked
def vapo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    nll_weight: float = 0.1,
    positive_above: float = 0.0,
    value_weight: float = 1.0,
    value_clip: float | None = None,
    aggregation: str = "token_mean",
    constant: float | None = None,
) -> LossOutput:
    """``PPO + nll_weight * NLL + value_weight * value``.

    PPO: ``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`` by token. NLL: ``-log p``, mean over the tokens of
    positive examples, those whose return is above ``positive_above`` (a correct answer's, where wrong ones get 0 or
    less): they are learnt once more as supervised rows, for they are rare. Value: ``value_errors``.
    """
    values, old_values, returns = _critic(inputs)
    inputs = whole_batch(inputs, partial(prepare, positive_above=positive_above))
    assert inputs.batch_chosen is not None, "prepare fills it"
    advantages = outside_mask_zero(inputs.advantages, inputs.mask)
    ratio = masked_log_ratio(inputs.logprobs, inputs.behaviour_logprobs, inputs.mask).exp()
    clip = Clip.of(clip_low, clip_high)
    per_token = clipped_surrogate(ratio, advantages, clip)
    positive = _positive(inputs, positive_above)
    nll = -outside_mask_zero(inputs.logprobs, positive).sum() / max(1, inputs.batch_chosen)
    errors = value_errors(values, old_values, returns, inputs.mask, clip=value_clip)
    weighed = per_token + value_weight * errors
    loss = aggregate(weighed, inputs, aggregation=aggregation, constant=constant) + nll_weight * nll
    with torch.no_grad():
        metrics = ratio_metrics(inputs, clipped=is_flat(ratio, advantages, clip))
        metrics["loss/value"] = (float(errors.sum()), float(inputs.mask.sum()))
        likelihood = outside_mask_zero(inputs.logprobs, positive)
        metrics["loss/positive_logprob"] = (float(likelihood.sum()), float(positive.sum()))
    return LossOutput(loss=loss, metrics=metrics)


@torch.no_grad()
def prepare(inputs: LossInputs, *, positive_above: float = 0.0, **_: object) -> LossInputs:
    """``batch_chosen``: tokens of positive examples in the whole batch, the denominator of their likelihood."""
    return replace(inputs, batch_chosen=int(_positive(inputs, positive_above).sum()), prepared=True)


def value_errors(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None) -> Tensor:
    """[N] ``max((V - R)^2, (old + clamp(V - old, -clip, clip) - R)^2) / 2``, 0 outside the mask; None: no clip."""
    wanted = outside_mask_zero(returns, mask)
    found, old = outside_mask_zero(values, mask), outside_mask_zero(old_values, mask)
    errors = (found - wanted).square()
    if clip is not None:
        errors = torch.maximum(errors, (old + (found - old).clamp(-clip, clip) - wanted).square())
    return errors / 2


@checked
def value_pretraining(
    inputs: LossInputs, *, aggregation: str = "token_mean", constant: float | None = None
) -> LossOutput:
    """``(V - R)^2 / 2`` alone, R the Monte-Carlo returns of a policy that stays as it is: before the first step.

    Over when the error and ``gae.explained_variance`` no longer improve. A critic that begins as a reward model would
    pull every early token down. The policy's log-probs get no gradient.
    """
    values, old_values, returns = _critic(inputs)
    errors = value_errors(values, old_values, returns, inputs.mask, clip=None)
    loss = aggregate(errors, inputs, aggregation=aggregation, constant=constant)
    return LossOutput(loss=loss, metrics={"loss/value": (float(errors.detach().sum()), float(inputs.mask.sum()))})


def _critic(inputs: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
    columns = {"values": inputs.values, "old_values": inputs.old_values, "returns": inputs.returns}
    for name, column in columns.items():
        if column is None:
            raise InvalidRecord(f"LossInputs.{name}: a loss with a critic needs them, found None")
    assert inputs.values is not None and inputs.old_values is not None and inputs.returns is not None
    return inputs.values, inputs.old_values.detach(), inputs.returns.detach()


def _positive(inputs: LossInputs, above: float) -> Tensor:
    """bool [N]"""
    return inputs.mask & (_critic(inputs)[2] > above)
