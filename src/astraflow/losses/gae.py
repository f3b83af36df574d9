"""Advantages and returns from a critic's values, on packed tokens: nothing masked ever enters (F30).

Sources: Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation", arXiv
1506.02438; Yuan et al. 2025 (VC-PPO), arXiv 2503.01491 (two lambdas); Yue et al. 2025, "VAPO", arXiv 2504.05118.
"""

from __future__ import annotations

import torch
from torch import Tensor

from astraflow.errors import ConfigError


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, sequence_ids: Tensor, *, lam: Tensor | float, gamma: float = 1.0
) -> Tensor:
    """Advantages [N], 0 outside the mask: ``A_t = delta_t + gamma lam A_t+1``, ``delta = r + gamma V_t+1 - V_t``.

    The next token is the next unmasked one of the same sequence, after the last one nothing is worth anything.
    ``lam``: one for all, or [N]: a token's own. Tokens of a sequence are in order; float64 inside.
    """
    _require("gamma", gamma)
    lambdas = torch.as_tensor(lam, dtype=torch.float64).expand(len(values))
    if len(lambdas) and not bool(((lambdas >= 0) & (lambdas <= 1)).all()):
        raise ConfigError(f"gae: lam must be in [0, 1], found {float(lambdas.min())} to {float(lambdas.max())}")
    found = [0.0] * len(values)
    columns = (mask.tolist(), sequence_ids.tolist(), rewards.tolist(), values.tolist(), lambdas.tolist())
    following: dict[int, tuple[float, float]] = {}
    """sequence → value and advantage of its next unmasked token"""
    for at, (present, sequence, reward, own, share) in reversed(list(enumerate(zip(*columns, strict=True)))):
        if present:
            value, advantage = following.get(sequence, (0.0, 0.0))
            found[at] = reward + gamma * value - own + gamma * share * advantage
            following[sequence] = (own, found[at])
    return torch.tensor(found, dtype=torch.float64).to(values)


def length_adaptive_lambda(mask: Tensor, sequence_ids: Tensor, *, alpha: float = 0.05) -> Tensor:
    """[N] ``1 - 1 / (alpha l)``, l the unmasked tokens of the sequence; 0 where that is negative (l < 1 / alpha).

    The coefficients of the deltas then sum to about ``alpha l``: a long answer keeps its last reward, a short one its
    low variance. VAPO, equation 8; alpha is 0.05 there.
    """
    if not alpha > 0:
        raise ConfigError(f"length_adaptive_lambda: alpha must be > 0, found {alpha}")
    _, index = torch.unique(sequence_ids, return_inverse=True)
    lengths = torch.bincount(index, weights=mask.double())[index].clamp(min=1)
    return (1 - 1 / (alpha * lengths)).clamp(min=0)


@torch.no_grad()
def returns_of(rewards: Tensor, mask: Tensor, sequence_ids: Tensor, *, gamma: float = 1.0) -> Tensor:
    """[N] what a critic is taught: the discounted rewards from a token on, without any value (lambda = 1)."""
    nothing = torch.zeros_like(rewards)
    return gae(rewards, nothing, mask, sequence_ids, lam=1.0, gamma=gamma)


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float | None:
    """``1 - Var(returns - values) / Var(returns)`` over the mask: 1 is a perfect critic, 0 no better than a constant.

    None where the returns do not vary: nothing is to be explained. Value pretraining ends when it stops rising.
    """
    found, wanted = values[mask].double(), returns[mask].double()
    if len(wanted) < 2 or bool((wanted == wanted[0]).all()):
        return None
    return float(1 - (wanted - found).var() / wanted.var())


@torch.no_grad()
def judged(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, float]:
    """How good values are, over the mask: ``explained_variance``, ``value_deviation`` and ``return_deviation``, and
    ``relative_error``, the mean of ``(returns - values)^2`` over that of ``returns^2``: 1 is no better than saying 0.

    What nothing can be said of is left out: where the returns do not vary, or are all 0.
    """
    found, wanted = values[mask].double(), returns[mask].double()
    if not len(wanted):
        return {}
    told = {"value_deviation": float(found.std(correction=0)), "return_deviation": float(wanted.std(correction=0))}
    explained = explained_variance(values, returns, mask)
    if explained is not None:
        told["explained_variance"] = explained
    size = float(wanted.square().mean())
    return told if size == 0 else {**told, "relative_error": float((wanted - found).square().mean()) / size}


def _require(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"gae: {name} must be in [0, 1], found {value}")
