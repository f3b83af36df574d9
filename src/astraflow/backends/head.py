"""Log-probs of the trained tokens from hidden states, and their gradient, with one [M, V] tensor in memory.

Autograd through logits → float → log_softmax → gather would hold [M, V] four times over. Here the forward keeps the
probabilities in the dtype of the computation, and the backward turns them in place into the gradient of the logits.

Letters: M heads, N targets (several may share a head), H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 18
"""Logits turned into probabilities at once in fp32: 1 MiB, so that all passes but the first find them in the cache."""
FLOOR = -1e30
"""Instead of -inf: exp gives 0 all the same, and 0 * FLOOR is 0 in the entropy where 0 * -inf is NaN (F51)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Where logits are wanted and which of them."""

    inverse_temperature: Tensor
    """float32 [M]"""
    target_head: Tensor
    """int64 [N]"""
    targets: Tensor
    """int64 [N]"""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadForward:
    logprobs: Tensor
    """float32 [N], natural log, without a graph"""
    entropy: Tensor
    """float32 [M] of the distribution at that temperature"""
    probabilities: Tensor
    """[M, V] in the dtype of the weights; ``head_backward`` overwrites it."""


def entropy_of(logits: Tensor) -> Tensor:
    """[..., V] → [...] in nats. A logit of -inf contributes nothing instead of 0 * -inf (F51)."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    return -(logprobs.exp() * logprobs.nan_to_num(neginf=0.0)).sum(-1)


@torch.no_grad()
def head_forward(hidden: Tensor, weight: Tensor, heads: Heads) -> HeadForward:
    """``hidden`` [M, H], ``weight`` [V, H]."""
    logits = hidden @ weight.T
    entropy = torch.empty(len(hidden), device=weight.device)
    total = torch.empty(len(hidden), device=weight.device)
    picked = logits[heads.target_head, heads.targets].float() * heads.inverse_temperature[heads.target_head]
    rows = max(1, CHUNK_ELEMENTS // len(weight))
    for start in range(0, len(hidden), rows):
        part = slice(start, start + rows)
        scaled = logits[part].float()
        scaled *= heads.inverse_temperature[part, None]
        highest = scaled.amax(-1, keepdim=True)
        scaled.sub_(highest).clamp_(min=FLOOR)
        shares = scaled.exp()
        sums = shares.sum(-1, keepdim=True)
        shares /= sums
        total[part] = (highest + sums.log())[:, 0]
        entropy[part] = sums.log()[:, 0] - torch.linalg.vecdot(shares, scaled)
        logits[part] = shares
    logprobs = picked - total[heads.target_head]
    return HeadForward(logprobs=logprobs, entropy=entropy, probabilities=logits)


@torch.no_grad()
def head_backward(
    forward: HeadForward, gradient: Tensor, hidden: Tensor, weight: Tensor, heads: Heads
) -> tuple[Tensor, Tensor]:
    """``gradient`` float32 [N] of the log-probs → gradients of ``hidden`` [M, H] and ``weight`` [V, H].

    d logits = (onehot - p) / temperature, summed over the targets of a head. The entries of targets are computed in
    fp32 from the exact log-prob: 1 - p of a confident token would vanish in a rounded p.
    """
    total = torch.zeros(len(hidden), device=hidden.device).index_add_(0, heads.target_head, gradient)
    scale = total * heads.inverse_temperature
    d_logits = forward.probabilities.mul_(-scale[:, None].to(forward.probabilities.dtype))
    keys, inverse = torch.unique(heads.target_head * len(weight) + heads.targets, return_inverse=True)
    own = torch.zeros(len(keys), device=hidden.device).index_add_(0, inverse, gradient)
    share = torch.empty(len(keys), device=hidden.device)
    share[inverse] = forward.logprobs.exp()
    at, token = keys // len(weight), keys % len(weight)
    exact = heads.inverse_temperature[at] * (own - total[at] * share)
    d_logits[at, token] = exact.to(d_logits.dtype)
    return d_logits @ weight, d_logits.T @ hidden
