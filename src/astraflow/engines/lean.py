"""A forward pass for models of the Llama family (Llama, Qwen2, Qwen3, Mistral-like): only what decoding needs.

Past keys and values lie in one tensor per layer, slot by slot, so that a step reads and writes them in place. Weights
are fused (q, k, v; gate, up) and, for bf16 on a CPU, packed once per update in the layout that its kernels read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from astraflow.engines.rows import Rows, Segment
from astraflow.errors import WeightsRefused

Linear = Callable[[torch.Tensor], torch.Tensor]
_ROOM = 64
"""The past of a slot grows in steps of so many tokens."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the forward pass must know of a config."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    context: int
    eps: float
    tied: bool
    head_norm: bool
    """RMS norm of each query and key head (Qwen3)."""


def shape_of(config: Any) -> Shape | None:
    """None: not of this family, the generic model must do."""
    if config.model_type not in ("llama", "qwen2", "qwen3") or config.hidden_act != "silu":
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in ("default", "linear", "llama3"):
        return None
    layer_types = getattr(config, "layer_types", None) or []
    if getattr(config, "use_sliding_window", False) or any(kind != "full_attention" for kind in layer_types):
        return None
    return Shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
        eps=config.rms_norm_eps,
        tied=bool(config.tie_word_embeddings),
        head_norm=config.model_type == "qwen3",
    )


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class LeanWeights:
    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Linear


class LeanModel:
    """Implements ``rows.Model``."""

    def __init__(
        self, shape: Shape, inv_freq: torch.Tensor, *, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = shape
        self._slots = slots
        self._dtype = dtype
        self._device = device
        self._inv_freq = inv_freq.to(device=device, dtype=torch.float32)
        self._room = 0
        self._past: list[torch.Tensor] = []
        """Per layer [slots, room, 2, kv_heads, head_dim]"""
        self._grow(_ROOM)

    @property
    def vocabulary(self) -> int:
        return self._shape.vocabulary

    @property
    def context(self) -> int:
        return self._shape.context

    # ── weights ──

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> LeanWeights:
        return prepare(self._shape, tensors, dtype=self._dtype, device=self._device)

    # ── the past ──

    @property
    def shares_prefixes(self) -> bool:
        return True

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        for past in self._past:
            past[target, :length].copy_(past[source, :length])

    def save_prefix(self, slot: int, length: int) -> torch.Tensor:
        return torch.stack([past[slot, :length] for past in self._past])

    def restore_prefix(self, saved: torch.Tensor, slot: int, length: int) -> None:
        self._grow(length)
        for past, values in zip(self._past, saved, strict=True):
            past[slot, :length].copy_(values[:length])

    def forget(self, slot: int) -> None: ...

    def _grow(self, length: int) -> None:
        if length <= self._room:
            return
        room = max(-(-length // _ROOM) * _ROOM, min(self._room * 2, self._shape.context))
        sizes = (self._slots, room, 2, self._shape.kv_heads, self._shape.head_dim)
        for layer in range(self._shape.layers):
            # Zeros, not garbage: what is masked out is multiplied by 0, and 0 x NaN is NaN.
            grown = torch.zeros(sizes, dtype=self._dtype, device=self._device)
            if self._room:
                grown[:, : self._room].copy_(self._past[layer])
                self._past[layer] = grown
            else:
                self._past.append(grown)
        self._room = room

    # ── forward ──

    @torch.inference_mode()
    def forward(self, weights: LeanWeights, rows: Rows) -> torch.Tensor:
        self._grow(max(segment.start + segment.count for segment in rows.segments))
        plan = _plan(rows, self._device, self._inv_freq, self._dtype, self._room)
        shape = self._shape
        n = len(rows.tokens)
        qk_heads = shape.heads + shape.kv_heads
        kv_width = 2 * shape.kv_heads * shape.head_dim
        x = F.embedding(plan.tokens, weights.embed)
        for layer, past in zip(weights.layers, self._past, strict=True):
            qkv = layer.qkv(_rms(x, layer.input_norm, shape.eps))
            qk = qkv[:, : qk_heads * shape.head_dim].view(n, qk_heads, shape.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                qk[:, : shape.heads] = _rms(qk[:, : shape.heads], layer.q_norm, shape.eps)
                qk[:, shape.heads :] = _rms(qk[:, shape.heads :], layer.k_norm, shape.eps)
            _rotate(qk, plan.cos, plan.sin)
            past.view(self._slots * self._room, kv_width).index_copy_(
                0, plan.places, qkv[:, shape.heads * shape.head_dim :]
            )
            attended = self._attend(qk[:, : shape.heads], past, plan)
            x = x + layer.out(attended)
            gate, up = layer.gate_up(_rms(x, layer.post_norm, shape.eps)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        return weights.head(_rms(x[plan.wanted], weights.norm, shape.eps))

    def _attend(self, q: torch.Tensor, past: torch.Tensor, plan: _Plan) -> torch.Tensor:
        """[N, heads x head_dim] from queries [N, heads, head_dim]."""
        shape = self._shape
        out = torch.empty((q.shape[0], shape.heads * shape.head_dim), dtype=q.dtype, device=q.device)
        if plan.decode:
            group = shape.heads // shape.kv_heads
            view = past[plan.low : plan.high, : plan.longest]
            queries = q[: plan.decode].view(plan.decode, shape.kv_heads, group, shape.head_dim)
            if plan.spread is not None:
                wide = torch.zeros((plan.high - plan.low, *queries.shape[1:]), dtype=q.dtype, device=q.device)
                queries = wide.index_copy_(0, plan.spread, queries)
            # The query heads that share a key head are the rows of one small attention: the past is read once.
            found = F.scaled_dot_product_attention(
                queries, view[:, :, 0].transpose(1, 2), view[:, :, 1].transpose(1, 2), attn_mask=plan.mask
            )
            if plan.spread is not None:
                found = found[plan.spread]
            out[: plan.decode] = found.reshape(plan.decode, -1)
        at = plan.decode
        for segment, mask in plan.prefill:
            view = past[segment.slot, : segment.start + segment.count]
            found = F.scaled_dot_product_attention(
                q[at : at + segment.count].transpose(0, 1)[None],
                view[:, 0].transpose(0, 1)[None],
                view[:, 1].transpose(0, 1)[None],
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=shape.heads != shape.kv_heads,
            )
            out[at : at + segment.count] = found[0].transpose(0, 1).reshape(segment.count, -1)
            at += segment.count
        return out


@dataclass(frozen=True, slots=True)
class _Plan:
    """What all layers share."""

    tokens: torch.Tensor
    cos: torch.Tensor
    """[N, 1, head_dim]"""
    sin: torch.Tensor
    places: torch.Tensor
    """Row of the past that each token writes, slots x room flattened."""
    decode: int
    """How many leading rows are one token each."""
    low: int
    high: int
    longest: int
    spread: torch.Tensor | None
    """Where decode rows lie between low and high, unless they fill it in order."""
    mask: torch.Tensor | None
    prefill: tuple[tuple[Segment, torch.Tensor | None], ...]
    wanted: torch.Tensor


def _plan(rows: Rows, device: torch.device, inv_freq: torch.Tensor, dtype: torch.dtype, room: int) -> _Plan:
    segments = rows.segments
    decode = sum(1 for segment in segments if segment.count == 1)
    positions = torch.tensor([s.start + i for s in segments for i in range(s.count)], dtype=torch.int64)
    bases = torch.tensor([s.slot * room for s in segments for _ in range(s.count)], dtype=torch.int64)
    ends = torch.tensor([s.count for s in segments], dtype=torch.int64).cumsum(0) - 1
    angles = positions.to(device)[:, None].float() * inv_freq[None, :]
    low = high = longest = 0
    spread = mask = None
    if decode:
        slots = [segment.slot for segment in segments[:decode]]
        low, high = min(slots), max(slots) + 1
        longest = max(segment.start for segment in segments[:decode]) + 1
        last = torch.zeros(high - low, dtype=torch.int64)
        places = torch.tensor(slots) - low
        last[places] = positions[:decode]
        mask = (torch.arange(longest)[None, :] <= last[:, None])[:, None, None, :].to(device)
        if slots != list(range(low, high)):
            spread = places.to(device)
    prefill = []
    for segment in segments[decode:]:
        own: torch.Tensor | None = None
        if segment.start:
            total = segment.start + segment.count
            own = torch.arange(total)[None, :] <= torch.arange(segment.start, total)[:, None]
            own = own.to(device)
        prefill.append((segment, own))
    return _Plan(
        tokens=torch.from_numpy(rows.tokens).to(device),
        cos=torch.cat((angles, angles), dim=-1).cos()[:, None].to(dtype),
        sin=torch.cat((angles, angles), dim=-1).sin()[:, None].to(dtype),
        places=(bases + positions).to(device),
        decode=decode,
        low=low,
        high=high,
        longest=longest,
        spread=spread,
        mask=mask,
        prefill=tuple(prefill),
        wanted=ends[torch.tensor(rows.wanted)].to(device),
    )


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotary embedding of [N, heads, head_dim] in place."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    x.mul_(cos).add_(turned.mul_(sin))


def prepare(
    shape: Shape, tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype, device: torch.device
) -> LeanWeights:
    """Raises WeightsRefused: missing, unknown or reshaped tensors, or a tied head that differs."""
    left = dict(tensors)

    def take(name: str, *size: int) -> torch.Tensor:
        if name not in left:
            raise WeightsRefused(f"tensor {name} is missing from the checkpoint")
        tensor = left.pop(name)
        if tuple(tensor.shape) != size:
            raise WeightsRefused(f"tensor {name} must have shape {list(size)}, found {list(tensor.shape)}")
        return tensor.to(device=device, dtype=dtype)

    def fused(prefix: str, names: tuple[str, ...], outs: tuple[int, ...], width: int) -> Linear:
        parts = [take(f"{prefix}.{name}.weight", out, width) for name, out in zip(names, outs, strict=True)]
        has_bias = f"{prefix}.{names[0]}.bias" in left
        bias = [take(f"{prefix}.{name}.bias", out) for name, out in zip(names, outs, strict=True)] if has_bias else []
        weight = torch.cat(parts) if len(parts) > 1 else parts[0].clone()
        return linear(weight, torch.cat(bias) if bias else None)

    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layers = []
    embed = take("model.embed_tokens.weight", shape.vocabulary, shape.hidden).clone()
    for index in range(shape.layers):
        name = f"model.layers.{index}"
        layers.append(
            LayerWeights(
                input_norm=take(f"{name}.input_layernorm.weight", shape.hidden).clone(),
                qkv=fused(f"{name}.self_attn", ("q_proj", "k_proj", "v_proj"), (q, kv, kv), shape.hidden),
                q_norm=take(f"{name}.self_attn.q_norm.weight", shape.head_dim).clone() if shape.head_norm else None,
                k_norm=take(f"{name}.self_attn.k_norm.weight", shape.head_dim).clone() if shape.head_norm else None,
                out=fused(f"{name}.self_attn", ("o_proj",), (shape.hidden,), q),
                post_norm=take(f"{name}.post_attention_layernorm.weight", shape.hidden).clone(),
                gate_up=fused(f"{name}.mlp", ("gate_proj", "up_proj"), (shape.intermediate,) * 2, shape.hidden),
                down=fused(f"{name}.mlp", ("down_proj",), (shape.hidden,), shape.intermediate),
            )
        )
    norm = take("model.norm.weight", shape.hidden).clone()
    if shape.tied:
        if "lm_head.weight" in left and not torch.equal(take("lm_head.weight", shape.vocabulary, shape.hidden), embed):
            raise WeightsRefused("lm_head.weight differs from model.embed_tokens.weight, which this model ties")
        head = linear(embed, None)
    else:
        head = linear(take("lm_head.weight", shape.vocabulary, shape.hidden).clone(), None)
    if left:
        raise WeightsRefused(f"tensors that this model does not have: {sorted(left)[:5]}")
    return LeanWeights(embed=embed, layers=tuple(layers), norm=norm, head=head)


def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """x -> x W^T + b; bf16 on a CPU reads a packed copy, which at small batches is up to twice as fast."""
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return lambda x: F.linear(x, weight, bias)
