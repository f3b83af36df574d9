"""REINFORCE with PPO's clip, a KL penalty in the reward, and advantages normalised over the whole batch; no critic.

Source: Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization",
arXiv 2501.03262. The recipe's ``credit`` is ``Returns()``, or ``GroupMean(std=False)`` for its variant with a baseline;
any other normalisation before this one would be a second one (F37).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from astraflow.losses.base import LossInputs, LossOutput, checked, whole_batch
from astraflow.losses.grpo import by_token
from astraflow.losses.kl import apply_kl
from astraflow.losses.surrogate import Clip

EPS = 1e-6
"""Added to the deviation, as everywhere."""


@torch.no_grad()
def prepare(inputs: LossInputs, *, kl: str = "k1_in_reward", kl_coefficient: float = 0.0, **_: object) -> LossInputs:
    """``advantages`` less the KL penalty, then less their mean and over their deviation, by the tokens of the batch."""
    if kl.endswith("in_reward"):
        inputs = apply_kl(inputs, kl=kl, kl_coefficient=kl_coefficient).inputs
    advantages = _normalised(inputs.advantages, inputs.mask).to(inputs.logprobs.dtype)
    return replace(inputs, advantages=advantages, prepared=True)


@checked
def reinforce_plus_plus(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    kl: str = "k1_in_reward",
    kl_coefficient: float = 0.0,
    aggregation: str = "token_mean",
    constant: float | None = None,
) -> LossOutput:
    """Per token ``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))``, A normalised by ``prepare``.

    A of a token is the reward less ``kl_coefficient`` times the KL estimates from it to the end of its sequence.
    """
    inputs = whole_batch(inputs, partial(prepare, kl=kl, kl_coefficient=kl_coefficient))
    left = 0.0 if kl.endswith("in_reward") else kl_coefficient  # what is in the reward is in the advantages by now
    clip = Clip.of(clip_low, clip_high)
    output = by_token(inputs, clip, kl=kl, kl_coefficient=left, aggregation=aggregation, constant=constant)
    paid = apply_kl(inputs, kl=kl, kl_coefficient=kl_coefficient).metrics
    return replace(output, metrics={**output.metrics, **paid})


def _normalised(advantages: Tensor, mask: Tensor) -> Tensor:
    """float64 (F40); all equal, compared exactly, or fewer than two: 0 (F34, F35)."""
    of_tokens = advantages[mask].double()
    if len(of_tokens) < 2 or bool((of_tokens == of_tokens[0]).all()):
        return torch.zeros_like(advantages, dtype=torch.float64)
    found = torch.zeros_like(advantages, dtype=torch.float64)
    found[mask] = (of_tokens - of_tokens.mean()) / (of_tokens.std() + EPS)
    return found
