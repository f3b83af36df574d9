"""A forward pass for models of the Llama family that computes only what decoding needs.

Rows of all sequences go through the matrices together, one token each; attention then takes the sequences that add one
token as one batched multiplication over a range of slots, and those that add more one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from astraflow.engines.lean_weights import LeanWeights, Shape, prepare, tensors_of
from astraflow.engines.past import Past
from astraflow.engines.rows import Rows, Segment

Saved = tuple[torch.Tensor, torch.Tensor]


class LeanModel:
    """Implements ``rows.Model``."""

    def __init__(
        self, shape: Shape, inv_freq: torch.Tensor, *, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._inv_freq = inv_freq.to(device=device, dtype=torch.float32)
        self._past = Past(
            layers=shape.layers,
            slots=slots,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype,
            device=device,
        )

    @property
    def vocabulary(self) -> int:
        return self._shape.vocabulary

    @property
    def context(self) -> int:
        return self._shape.context

    @property
    def copies(self) -> LeanModel:
        return self

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> LeanWeights:
        return prepare(self._shape, tensors, dtype=self._dtype, device=self._device)

    def tensors(self, weights: LeanWeights) -> Iterator[tuple[str, torch.Tensor]] | None:
        return tensors_of(self._shape, weights)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self._past.copy(source, target, length)

    def save_prefix(self, slot: int, length: int) -> Saved:
        return self._past.save(slot, length)

    def restore_prefix(self, saved: Saved, slot: int, length: int) -> None:
        self._past.restore(saved, slot, length)

    def forget(self, slot: int) -> None: ...

    def forward(self, weights: LeanWeights, rows: Rows) -> torch.Tensor:
        shape, past = self._shape, self._past
        past.grow(max(segment.start + segment.count for segment in rows.segments))
        plan = _plan(rows, shape, self._inv_freq, self._dtype)
        n, width = len(rows.tokens), shape.head_dim
        keys_end = shape.heads + shape.kv_heads
        x = F.embedding(plan.tokens, weights.embed)
        for index, layer in enumerate(weights.layers):
            heads = layer.qkv(_rms(x, layer.input_norm, shape.eps)).view(n, -1, width)
            if layer.q_norm is not None and layer.k_norm is not None:
                heads[:, : shape.heads] = _rms(heads[:, : shape.heads], layer.q_norm, shape.eps)
                heads[:, shape.heads : keys_end] = _rms(heads[:, shape.heads : keys_end], layer.k_norm, shape.eps)
            turned = _rotate(heads[:, :keys_end], plan.cos, plan.sin)
            past.write(index, plan.slots, plan.positions, turned[:, shape.heads :], heads[:, keys_end:])
            attended = self._attend(index, turned[:, : shape.heads], plan)
            x = layer.out.plus(attended, x)
            h = _rms(x, layer.post_norm, shape.eps)
            x = layer.down.plus(layer.up.times(h, layer.gate.silu(h)), x)
        return weights.head(_rms(x[plan.wanted], weights.norm, shape.eps))

    def _attend(self, layer: int, q: torch.Tensor, plan: _Plan) -> torch.Tensor:
        """[N, heads x head_dim] from queries [N, heads, head_dim]."""
        if not plan.prefill:
            return self._attend_decode(layer, q, plan)
        parts = [self._attend_decode(layer, q[: plan.decode], plan)] if plan.decode else []
        at = plan.decode
        for segment, mask in plan.prefill:
            parts.append(self._attend_segment(layer, q[at : at + segment.count], segment, mask))
            at += segment.count
        return torch.cat(parts)

    def _attend_decode(self, layer: int, q: torch.Tensor, plan: _Plan) -> torch.Tensor:
        """The query heads that share a key head are the rows of one small product, so the past is read once."""
        shape = self._shape
        group = shape.heads // shape.kv_heads
        if plan.spread is not None:
            wide = torch.zeros((plan.high - plan.low, shape.heads, shape.head_dim), dtype=q.dtype, device=q.device)
            q = wide.index_copy_(0, plan.spread, q)
        batch = q.shape[0] * shape.kv_heads
        keys = self._past.keys[layer][plan.low : plan.high].flatten(0, 1)[:, :, : plan.longest]
        values = self._past.values[layer][plan.low : plan.high].flatten(0, 1)[:, : plan.longest]
        scores = torch.baddbmm(
            plan.mask, q.reshape(batch, group, shape.head_dim), keys, alpha=1 / math.sqrt(shape.head_dim)
        )
        found = torch.bmm(torch.softmax(scores, dim=-1), values).view(-1, shape.heads * shape.head_dim)
        return found if plan.spread is None else found[plan.spread]

    def _attend_segment(self, layer: int, q: torch.Tensor, segment: Segment, mask: torch.Tensor | None) -> torch.Tensor:
        shape = self._shape
        total = segment.start + segment.count
        found = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            self._past.keys[layer][segment.slot, :, :, :total].transpose(1, 2).contiguous()[None],
            self._past.values[layer][segment.slot, :, :total][None],
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=shape.heads != shape.kv_heads,
        )
        return found[0].transpose(0, 1).reshape(segment.count, -1)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What all layers share."""

    tokens: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    cos: torch.Tensor
    """[N, 1, head_dim]"""
    sin: torch.Tensor
    """Likewise, the first half negated."""
    decode: int
    """How many leading rows are one token each."""
    low: int
    high: int
    longest: int
    spread: torch.Tensor | None
    """Where decode rows lie between slots ``low`` and ``high``, unless they fill them in order."""
    mask: torch.Tensor
    """[(high - low) x kv_heads, query heads per key head, longest]: 0 or -inf"""
    prefill: tuple[tuple[Segment, torch.Tensor | None], ...]
    wanted: torch.Tensor


def _plan(rows: Rows, shape: Shape, inv_freq: torch.Tensor, dtype: torch.dtype) -> _Plan:
    segments, device = rows.segments, inv_freq.device
    decode = sum(1 for segment in segments if segment.count == 1)
    positions = torch.tensor([s.start + i for s in segments for i in range(s.count)], device=device)
    angles = positions[:, None].float() * inv_freq[None, :]
    cos, sin = angles.cos(), angles.sin()
    low = high = longest = 0
    spread = None
    mask = torch.empty(0, dtype=dtype, device=device)
    if decode:
        slots = [segment.slot for segment in segments[:decode]]
        low, high = min(slots), max(slots) + 1
        longest = max(segment.start for segment in segments[:decode]) + 1
        places = torch.tensor(slots, device=device) - low
        last = torch.zeros(high - low, dtype=torch.int64, device=device)
        last[places] = positions[:decode]
        hidden = torch.arange(longest, device=device)[None, :] > last[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -math.inf)
        mask = mask.repeat_interleave(shape.kv_heads, dim=0)[:, None].expand(-1, shape.heads // shape.kv_heads, -1)
        spread = None if slots == list(range(low, high)) else places
    ends = torch.tensor([segment.count for segment in segments], device=device).cumsum(0) - 1
    return _Plan(
        tokens=torch.from_numpy(rows.tokens).to(device),
        slots=torch.tensor([s.slot for s in segments for _ in range(s.count)], device=device),
        positions=positions,
        cos=torch.cat((cos, cos), dim=-1)[:, None].to(dtype),
        sin=torch.cat((-sin, sin), dim=-1)[:, None].to(dtype),
        decode=decode,
        low=low,
        high=high,
        longest=longest,
        spread=spread,
        mask=mask,
        prefill=tuple((segment, _causal(segment, device)) for segment in segments[decode:]),
        wanted=ends[torch.tensor(rows.wanted, device=device)],
    )


def _causal(segment: Segment, device: torch.device) -> torch.Tensor | None:
    """bool [count, start + count]: what each row may see. None: it is the plain triangle."""
    if not segment.start:
        return None
    total = segment.start + segment.count
    seen = torch.arange(total, device=device)
    return seen[None, :] <= seen[segment.start :, None]


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """In float32, rounded before the weight is applied, as transformers does it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [N, heads, head_dim]."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
