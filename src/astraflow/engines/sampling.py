"""From logits to tokens and log-probs, for many requests at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

_ROWS = 4
"""Rows of a CPU tensor that are worked on together: few enough that they stay in the cache from pass to pass."""
_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is sampled."""

    temperature: float
    top_p: float
    top_k: int
    uniform: float
    """In [0, 1): from (seed, position)."""
    given: int | None = None
    """This token and no other: only its log-prob is wanted."""

    @property
    def truncates(self) -> bool:
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


class Sampled(NamedTuple):
    tokens: list[int]
    logprobs: list[float]


def sample(logits: torch.Tensor, draws: list[Draw]) -> Sampled:
    """Tokens and log-probs of ``logits`` [B, V]. The log-prob is that of softmax(logits / temperature) before top-p and
    top-k; temperature 0 takes the largest logit and tells its log-prob at temperature 1.

    The draw inverts the cumulative distribution in the order of token ids, so that rounding in the logits moves a
    token only where the uniform falls within that rounding of an edge.
    """
    rows = _ROWS if logits.device.type == "cpu" else len(draws)
    found = Sampled([], [])
    for start in range(0, len(draws), rows):
        part = _sample(logits[start : start + rows], draws[start : start + rows])
        found.tokens.extend(part.tokens)
        found.logprobs.extend(part.logprobs)
    return found


def _sample(logits: torch.Tensor, draws: list[Draw]) -> Sampled:
    temperatures = torch.tensor([draw.temperature for draw in draws], device=logits.device)
    greedy = temperatures == 0
    scaled = logits.float()
    if any(draw.temperature not in (0.0, 1.0) for draw in draws):
        scaled = scaled / torch.where(greedy, 1.0, temperatures)[:, None]
    top = scaled.amax(dim=-1, keepdim=True)
    weights = (scaled - top).exp_()
    sums = _block_sums(weights)
    total = sums.sum(dim=-1)
    if any(draw.truncates for draw in draws):
        weights = _truncate(weights, draws)
        sums = _block_sums(weights)
    tokens = _invert(weights, sums, torch.tensor([draw.uniform for draw in draws], dtype=torch.float64))
    if any(draw.temperature == 0 for draw in draws):
        tokens = torch.where(greedy, scaled.argmax(dim=-1), tokens)
    for row, draw in enumerate(draws):
        if draw.given is not None:
            tokens[row] = draw.given
    chosen = (scaled.gather(1, tokens[:, None]) - top).squeeze(1).double()
    return Sampled(tokens.tolist(), (chosen - total.log()).clamp(max=0.0).tolist())


def _block_sums(weights: torch.Tensor) -> torch.Tensor:
    """float64 [B, V / block]: each block in float32, all of them in float64."""
    batch, size = weights.shape
    whole = size - size % _BLOCK
    sums = weights[:, :whole].view(batch, -1, _BLOCK).sum(dim=-1).double()
    if whole == size:
        return sums
    return torch.cat((sums, weights[:, whole:].sum(dim=-1, keepdim=True).double()), dim=-1)


def _invert(weights: torch.Tensor, sums: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Index at which the running sum of ``weights`` [B, V] passes uniform x total: first the block, then within it."""
    device = weights.device
    running = sums.cumsum(dim=-1)
    target = uniforms.to(device) * running[:, -1]
    block = torch.searchsorted(running, target[:, None], right=True).clamp(max=sums.shape[1] - 1)
    before = (running - sums).gather(1, block)
    offsets = torch.arange(_BLOCK, device=device)[None, :]
    index = block * _BLOCK + offsets
    inside = index < weights.shape[1]
    inner = torch.where(inside, weights.gather(1, index.clamp(max=weights.shape[1] - 1)), 0.0).double()
    passed = torch.searchsorted(inner.cumsum(dim=-1), target[:, None] - before, right=True)
    # Rounding can pass the block's end or stop on a weight of zero: the last one up to there that has some is meant.
    alive = (inner > 0) & (offsets <= passed)
    last = torch.where(alive, offsets, -1).amax(dim=-1)
    first = (inner > 0).int().argmax(dim=-1)
    return block.squeeze(1) * _BLOCK + torch.where(last >= 0, last, first)


def _truncate(weights: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    """Zero what top-k, then top-p, leave out; ties at an edge are broken by token id."""
    kept = weights.clone()
    for row, draw in enumerate(draws):
        if not draw.truncates:
            continue
        values, order = torch.sort(weights[row], descending=True, stable=True)
        if draw.top_k:
            values[draw.top_k :] = 0
        if draw.top_p < 1:
            wide = values.double()
            before = wide.cumsum(dim=0) - wide
            values[before >= draw.top_p * wide.sum()] = 0
        kept[row] = torch.zeros_like(values).scatter_(0, order, values)
    return kept
