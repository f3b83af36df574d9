"""A transformer on packed rows: hidden states with a graph, and their gradient into fp32 masters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from astraflow.backends.attention import TreeAttention
from astraflow.backends.masters import Masters
from astraflow.trainer.packing import PackedRow


class Backbone:
    """The layers of one model. ``masters`` hold its parameters by the names that the model gives them."""

    def __init__(self, model: Any, attention: TreeAttention, masters: Masters) -> None:
        self._body = model.base_model
        self._attention = attention
        self._masters = masters
        self._embedding = model.get_input_embeddings().weight
        self._embedding_name = {id(each): name for name, each in model.named_parameters()}[id(self._embedding)]

    def hidden(self, packed: PackedRow) -> tuple[Tensor, Tensor]:
        """Last hidden states [L, H] with a graph, and the embedded tokens [L, H] that the gradient arrives at."""
        device = self._embedding.device
        inputs = self._embedding.detach()[torch.from_numpy(packed.tokens).to(device)].requires_grad_()
        positions = torch.from_numpy(packed.positions).to(device)[None]
        with self._attention.of(packed) as mask:
            out = self._body(inputs_embeds=inputs[None], attention_mask=mask, position_ids=positions, use_cache=False)
        return out.last_hidden_state[0], inputs

    def backward(self, packed: PackedRow, hidden: Tensor, inputs: Tensor, d_heads: Tensor) -> None:
        """``d_heads`` [M, H]: the gradient at the heads. Of the embedding only rows that were used get any."""
        device = hidden.device
        head, tokens = (torch.from_numpy(each).to(device) for each in (packed.head, packed.tokens))
        torch.autograd.backward(hidden, torch.zeros_like(hidden).index_add_(0, head, d_heads))
        assert inputs.grad is not None
        with torch.no_grad():
            self._masters.collect_rows(self._embedding_name, tokens, inputs.grad)
