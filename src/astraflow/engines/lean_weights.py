"""Weights of the Llama family (Llama, Qwen2, Qwen3) as the lean forward pass reads them.

Queries, keys and values are one matrix. For bf16 on a CPU each matrix is packed once per update in the layout that its
kernels read: at small batches up to twice as fast, and additions and products come with the multiplication.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from astraflow.errors import WeightsRefused


class Linear(Protocol):
    """x [N, in] -> x W^T + b [N, out]"""

    @property
    def bias(self) -> torch.Tensor | None: ...

    @property
    def matrix(self) -> torch.Tensor | None:
        """W, as it is computed with; None: it cannot be read back."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """silu(x W^T + b)"""

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """(x W^T + b) * other"""

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """(x W^T + b) + other"""


@dataclass(frozen=True, slots=True)
class PlainLinear:
    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def matrix(self) -> torch.Tensor:
        return self.weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self(x))

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self(x) * other

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self(x) + other


@dataclass(frozen=True, slots=True)
class PackedLinear:
    packed: torch.Tensor
    bias: torch.Tensor | None

    @property
    def matrix(self) -> torch.Tensor | None:
        try:
            return self.packed.to_dense()
        except RuntimeError:  # a layout that this torch does not turn back
            return None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _pointwise(x, self.packed, self.bias, "none", [], "")

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return _pointwise(x, self.packed, self.bias, "swish", [], "")

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return _pointwise_binary(x, other, self.packed, self.bias, "mul")

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return _pointwise_binary(x, other, self.packed, self.bias, "add")


def _pointwise(*args: Any) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(*args)
    return out


def _pointwise_binary(*args: Any) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(*args)
    return out


def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight, None), bias)
    return PlainLinear(weight, bias)


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
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class LeanWeights:
    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Linear


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
                gate=fused(f"{name}.mlp", ("gate_proj",), (shape.intermediate,), shape.hidden),
                up=fused(f"{name}.mlp", ("up_proj",), (shape.intermediate,), shape.hidden),
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


def tensors_of(shape: Shape, weights: LeanWeights) -> Iterator[tuple[str, torch.Tensor]] | None:
    """The counterpart of ``prepare``; None: this machine's packed matrices cannot be read back."""
    if weights.head.matrix is None or any(layer.qkv.matrix is None for layer in weights.layers):
        return None
    return _tensors_of(shape, weights)


def _tensors_of(shape: Shape, weights: LeanWeights) -> Iterator[tuple[str, torch.Tensor]]:
    yield "model.embed_tokens.weight", weights.embed
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for index, layer in enumerate(weights.layers):
        name = f"model.layers.{index}"
        yield f"{name}.input_layernorm.weight", layer.input_norm
        yield f"{name}.post_attention_layernorm.weight", layer.post_norm
        if layer.q_norm is not None and layer.k_norm is not None:
            yield f"{name}.self_attn.q_norm.weight", layer.q_norm
            yield f"{name}.self_attn.k_norm.weight", layer.k_norm
        yield from _parts(f"{name}.self_attn", ("q_proj", "k_proj", "v_proj"), (q, kv, kv), layer.qkv)
        yield from _parts(f"{name}.self_attn", ("o_proj",), (shape.hidden,), layer.out)
        yield from _parts(f"{name}.mlp", ("gate_proj",), (shape.intermediate,), layer.gate)
        yield from _parts(f"{name}.mlp", ("up_proj",), (shape.intermediate,), layer.up)
        yield from _parts(f"{name}.mlp", ("down_proj",), (shape.hidden,), layer.down)
    yield "model.norm.weight", weights.norm
    matrix = weights.head.matrix
    # A tied head is a second copy where matrices are packed: it is shown, so that it is compared as well.
    if matrix is not None and (not shape.tied or matrix.data_ptr() != weights.embed.data_ptr()):
        yield "lm_head.weight", matrix


def _parts(
    prefix: str, names: tuple[str, ...], outs: tuple[int, ...], fused: Linear
) -> Iterator[tuple[str, torch.Tensor]]:
    matrix = fused.matrix
    assert matrix is not None, "all matrices of a machine are packed alike"
    at = 0
    for name, out in zip(names, outs, strict=True):
        yield f"{prefix}.{name}.weight", matrix[at : at + out]
        if fused.bias is not None:
            yield f"{prefix}.{name}.bias", fused.bias[at : at + out]
        at += out
