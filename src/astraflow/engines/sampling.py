"""From logits to tokens and log-probs, for many requests at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is sampled."""

    temperature: float
    top_p: float
    top_k: int
    uniform: float
    """In [0, 1): from (seed, position)."""


def sample(logits: torch.Tensor, draws: list[Draw]) -> tuple[list[int], list[float]]:
    """Tokens and log-probs of ``logits`` [B, V]. The log-prob is that of softmax(logits / temperature) before top-p and
    top-k; temperature 0 takes the largest logit and tells its log-prob at temperature 1.

    The draw inverts the cumulative distribution in the order of token ids, so that rounding in the logits moves a
    token only where the uniform falls within that rounding of an edge.
    """
    scaled = logits.float()
    if any(draw.temperature not in (0.0, 1.0) for draw in draws):
        scaled = scaled / _column([draw.temperature or 1.0 for draw in draws], scaled)
    top = scaled.amax(dim=-1, keepdim=True)
    weights = torch.exp(scaled - top)
    total = weights.sum(dim=-1, dtype=torch.float64)
    kept = weights
    if any(draw.temperature > 0 and (draw.top_p < 1 or draw.top_k > 0) for draw in draws):
        kept = _truncate(weights, draws)
    tokens = _invert(kept, torch.tensor([draw.uniform for draw in draws], dtype=torch.float64, device=logits.device))
    greedy = torch.tensor([draw.temperature == 0 for draw in draws], device=logits.device)
    if bool(greedy.any()):
        tokens = torch.where(greedy, scaled.argmax(dim=-1), tokens)
    chosen = scaled.gather(1, tokens[:, None]).squeeze(1).double()
    logprobs = (chosen - top.squeeze(1).double() - total.log()).clamp(max=0.0)
    return tokens.tolist(), logprobs.tolist()


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Index at which the running sum of ``weights`` [B, V] passes uniform x total: first the block, then within it."""
    batch, size = weights.shape
    spare = -size % _BLOCK
    if spare:
        weights = torch.nn.functional.pad(weights, (0, spare))
    blocks = weights.view(batch, -1, _BLOCK)
    sums = blocks.sum(dim=-1).double().cumsum(dim=-1)
    target = uniforms * sums[:, -1]
    block = torch.searchsorted(sums, target[:, None], right=True).squeeze(1).clamp(max=sums.shape[1] - 1)
    rows = torch.arange(batch, device=weights.device)
    before = torch.where(block > 0, sums[rows, (block - 1).clamp(min=0)], torch.zeros_like(target))
    inner = blocks[rows, block].double()
    running = inner.cumsum(dim=-1)
    rest = torch.minimum(target - before, running[:, -1] * (1 - 2.0**-52))
    index = torch.searchsorted(running, rest.clamp(min=0)[:, None], right=True).squeeze(1).clamp(max=_BLOCK - 1)
    # Rounding can land on a token of weight zero: step back to the last one that has some.
    alive = (inner > 0) & (torch.arange(_BLOCK, device=weights.device)[None, :] <= index[:, None])
    last = torch.where(alive, torch.arange(_BLOCK, device=weights.device)[None, :], -1).amax(dim=-1)
    first = (inner > 0).int().argmax(dim=-1)
    return block * _BLOCK + torch.where(last >= 0, last, first)


def _truncate(weights: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    """Zero what top-k, then top-p, leave out; ties at the edge of top-k are broken by id."""
    kept = weights.clone()
    for row, draw in enumerate(draws):
        if draw.temperature == 0 or (draw.top_p >= 1 and draw.top_k == 0):
            continue
        values, order = torch.sort(weights[row], descending=True, stable=True)
        if draw.top_k:
            values[draw.top_k :] = 0
        if draw.top_p < 1:
            before = values.double().cumsum(dim=0) - values.double()
            values[before >= draw.top_p * values.double().sum()] = 0
        kept[row] = torch.zeros_like(values).scatter_(0, order, values)
    return kept


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
