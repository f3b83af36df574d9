"""Attention of a packed row inside a Hugging Face model: every token sees its own prefix in the tree, nothing else.

On a GPU one dense mask goes to torch's kernel. On a CPU, whose kernel computes what the mask hides, the tree is cut
into small dense blocks (``blocks.py``): 7 times faster at the size of a quickstart step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from astraflow.backends.blocks import plan_blocks
from astraflow.errors import ConfigError
from astraflow.trainer.packing import PackedRow

NAME = "astraflow_tree"
KEEP_BYTES = 8 << 20
"""Attention weights of one layer up to this size are kept for the backward, larger ones are computed again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    start: int
    stop: int
    past: Tensor
    """int64 [P]"""
    bias: Tensor
    """float32 [1, 1, Q, P + Q]: 0 or -inf"""


_pieces: ContextVar[tuple[_Piece, ...]] = ContextVar("pieces of the packed row in the model now")


class TreeAttention:
    """Makes a model compute the attention of packed rows."""

    def __init__(self, model: Any, *, dense: bool | None = None) -> None:
        """``dense``: one mask for the whole packed row; None: exactly where the model is not on a CPU."""
        self._device = model.get_input_embeddings().weight.device
        self._dense = self._device.type != "cpu" if dense is None else dense
        self._model = model
        if not self._dense:
            from transformers import AttentionInterface

            AttentionInterface.register(NAME, _attend)
            model.set_attn_implementation(NAME)

    @contextmanager
    def plain(self, name: str = "sdpa") -> Iterator[None]:
        """The model computes ordinary rows within this context."""
        self._model.set_attn_implementation(name)
        try:
            yield
        finally:
            self._model.set_attn_implementation(name if self._dense else NAME)

    @contextmanager
    def of(self, packed: PackedRow) -> Iterator[Tensor]:
        """The 4-dimensional ``attention_mask`` of a forward and backward within this context."""
        if self._dense:
            yield torch.from_numpy(packed.may_attend()).to(self._device)[None, None]
            return
        token = _pieces.set(tuple(_pieces_of(packed)))
        try:
            yield torch.zeros(1, 1, 1, 1)  # a 4-dimensional mask is passed on as it is; ours is in the context
        finally:
            _pieces.reset(token)


def _pieces_of(packed: PackedRow) -> Iterator[_Piece]:
    for block in plan_blocks(packed):
        seen = torch.from_numpy(block.seen)
        bias = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        yield _Piece(start=block.start, stop=block.stop, past=torch.from_numpy(block.past), bias=bias[None, None])


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: [1, heads, L, D], twice [1, kv heads, L, D] → [1, L, heads, D]."""
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if unknown:
        raise ConfigError(f"{type(module).__name__} needs {unknown[0]}, which packed attention does not compute")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out: Tensor = _BlockAttention.apply(query[0], key[0], value[0], scale, _pieces.get())  # type: ignore[no-untyped-call]
    return out[None], None


class _BlockAttention(torch.autograd.Function):
    """softmax(q k / scale + bias) v, block by block, query heads of one key head in one product."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, pieces: tuple[_Piece, ...]
    ) -> Tensor:
        heads, length, size = query.shape
        out = query.new_empty(length, heads, size)
        area = heads * sum(piece.bias.numel() for piece in pieces) * query.element_size()
        kept: list[Tensor | None] = []
        for piece in pieces:
            q, k, v = _gather(query, key, value, piece)
            weights = _weights(q, k, scale, piece)
            mixed = torch.bmm(weights, v)
            out[piece.start : piece.stop] = mixed.view(heads, -1, size).transpose(0, 1)
            kept.append(weights if area <= KEEP_BYTES else None)
        ctx.save_for_backward(query, key, value)
        ctx.kept, ctx.scale, ctx.pieces = kept, scale, pieces
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        heads, _, size = query.shape
        d_query, d_key, d_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for piece, kept in zip(ctx.pieces, ctx.kept, strict=True):
            q, k, v = _gather(query, key, value, piece)
            weights = _weights(q, k, ctx.scale, piece) if kept is None else kept
            d_out = gradients[0][piece.start : piece.stop].transpose(0, 1).reshape(q.shape)
            _scatter(d_value, torch.bmm(weights.transpose(1, 2), d_out), piece)
            d_weights = torch.bmm(d_out, v.transpose(1, 2)).float()
            shares = weights.float()
            d_scores = d_weights.sub_((d_weights * shares).sum(-1, keepdim=True)).mul_(shares).mul_(ctx.scale)
            d_scores = d_scores.to(query.dtype)
            d_query[:, piece.start : piece.stop] = torch.bmm(d_scores, k).view(heads, -1, size)
            _scatter(d_key, torch.bmm(d_scores.transpose(1, 2), q), piece)
        return d_query, d_key, d_value, None, None


def _gather(query: Tensor, key: Tensor, value: Tensor, piece: _Piece) -> tuple[Tensor, Tensor, Tensor]:
    """[kv heads, group * Q, D] and twice [kv heads, P + Q, D]."""
    q = query[:, piece.start : piece.stop].reshape(len(key), -1, query.shape[-1])
    both = [
        torch.cat([each.index_select(1, piece.past), each[:, piece.start : piece.stop]], 1) for each in (key, value)
    ]
    return q, both[0], both[1]


def _scatter(into: Tensor, gradient: Tensor, piece: _Piece) -> None:
    past = len(piece.past)
    into.index_add_(1, piece.past, gradient[:, :past])
    into[:, piece.start : piece.stop] += gradient[:, past:]


def _weights(q: Tensor, k: Tensor, scale: float, piece: _Piece) -> Tensor:
    """[kv heads, group * Q, P + Q], each row summing to 1; softmax in fp32."""
    scores = torch.bmm(q, k.transpose(1, 2)).float().view(len(k), -1, *piece.bias.shape[2:])
    return torch.softmax(scores.mul_(scale).add_(piece.bias), -1).to(q.dtype).view(len(q), q.shape[1], -1)
