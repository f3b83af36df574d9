"""The distance to the reference policy, as a term of the loss or taken off the reward.

For d = log p - log q of a token that p sampled (Schulman 2020, "Approximating KL Divergence"):

    k1 = d      k2 = d²/2      k3 = exp(-d) - 1 + d        E[k1] = E[k3] = KL(p, q);  k1 may be < 0, k2 and k3 never

What is estimated is one thing, what is descended another (Tang and Munos 2025, arXiv 2506.09477; Liu et al. 2025,
"Rethinking KL Regularization in RLHF", arXiv 2510.01555; Shah et al. 2025, arXiv 2512.21852):

    in the reward   k1: the gradient of KL(p, q)                        k2, k3: of neither KL
    in the loss     k1: nothing on average     k2: of KL(p, q)     k3: of KL(q, p), by p's samples: large where p << q
    k3_weighted     r · k3 in the loss, r = p / behaviour: of KL(p, q), also off policy; DeepSeek-V3.2, arXiv 2512.02556
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from astraflow.errors import ConfigError, InvalidRecord
from astraflow.losses.base import LossInputs
from astraflow.losses.ratios import MAX_LOG_RATIO, masked_log_ratio, outside_mask_zero

ESTIMATORS = ("k1", "k2", "k3")


class Penalty(NamedTuple):
    """What a KL term does to a loss."""

    inputs: LossInputs
    """With the advantages that the policy gradient is to use."""
    per_token: Tensor
    """[N] to be added to the loss of each token."""
    metrics: dict[str, tuple[float, float]]


def estimate_kl(difference: Tensor, estimator: str) -> Tensor:
    """Of ``difference`` = log p - log q. k3 is flat below - ``MAX_LOG_RATIO``: exp of it would overflow (F41)."""
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        bounded = difference.clamp(min=-MAX_LOG_RATIO)
        return torch.expm1(-bounded) + bounded
    raise ConfigError(f"KL estimator {estimator!r} is unknown; there are {', '.join(ESTIMATORS)}")


def apply_kl(inputs: LossInputs, *, kl: str, kl_coefficient: float) -> Penalty:
    """``kl``: one of ``loss_options.KL``. A coefficient of 0 asks for no reference.

    In the loss: ``kl_coefficient`` · estimate, of the current policy. In the reward: every token's advantage is less by
    ``kl_coefficient`` · the estimates from it to the end of its sequence, of the policy that sampled (Ziegler et al.
    2019, arXiv 1909.08593): what it can still cause.
    """
    nothing = torch.zeros_like(inputs.logprobs)
    if kl_coefficient == 0:
        return Penalty(inputs, nothing, {})
    if inputs.reference_logprobs is None:
        raise InvalidRecord("LossInputs.reference_logprobs: a loss with kl_coefficient > 0 needs them, found None")
    estimator, _, place = kl.partition("_")
    if place == "in_reward":
        with torch.no_grad():
            sampled = outside_mask_zero(inputs.behaviour_logprobs - inputs.reference_logprobs, inputs.mask)
            found = estimate_kl(sampled, estimator)
            advantages = inputs.advantages - kl_coefficient * to_the_end(found, inputs.sequence_ids)
        return Penalty(replace(inputs, advantages=advantages), nothing, _metrics(found, inputs))
    difference = outside_mask_zero(inputs.logprobs - inputs.reference_logprobs, inputs.mask)
    found = estimate_kl(difference, estimator)
    metrics = _metrics(found, inputs)
    if place == "weighted":
        found = found * masked_log_ratio(inputs.logprobs, inputs.behaviour_logprobs, inputs.mask).exp()
    return Penalty(inputs, kl_coefficient * found, metrics)


def to_the_end(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """[N]: at every token, the sum of ``values`` from it to the last token of its sequence."""
    order = torch.argsort(sequence_ids, stable=True)
    ids, ordered = sequence_ids[order], values[order].double()
    after = ordered.flip(0).cumsum(0).flip(0)
    last = torch.searchsorted(ids, ids, right=True)  # the next sequence begins there: what comes after is not ours
    beyond = torch.cat([after, after.new_zeros(1)])[last]
    found = torch.empty_like(values)
    found[order] = (after - beyond).to(values.dtype)
    return found


def _metrics(found: Tensor, inputs: LossInputs) -> dict[str, tuple[float, float]]:
    return {"loss/reference_kl": (float(found.detach().sum()), float(inputs.mask.sum()))}
