"""Log-probs of a batch's trained tokens without a gradient: what a loss must know before it is differentiated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from astraflow.backends.attention import TreeAttention
from astraflow.backends.head import Heads, head_forward
from astraflow.trainer.packing import PackedRow


def heads_of(packed: PackedRow, temperature: float, device: torch.device) -> Heads:
    """Supervised targets are predicted at temperature 1."""
    supervised = torch.from_numpy(packed.head_supervised).to(device)
    return Heads(
        inverse_temperature=torch.where(supervised, 1.0, temperature).reciprocal().float(),
        target_head=torch.from_numpy(packed.target_head).to(device),
        targets=torch.from_numpy(packed.targets).to(device),
    )


class Scorer:
    """One model, read only."""

    def __init__(self, model: Any, attention: TreeAttention, *, temperature: float) -> None:
        self._model = model
        self._attention = attention
        self._temperature = temperature

    @torch.no_grad()
    def __call__(self, packed: PackedRow) -> Tensor:
        """float32 [N]"""
        embedding = self._model.get_input_embeddings().weight
        device = embedding.device
        with self._attention.of(packed) as mask:
            hidden = self._model.base_model(
                inputs_embeds=embedding[torch.from_numpy(packed.tokens).to(device)][None],
                attention_mask=mask,
                position_ids=torch.from_numpy(packed.positions).to(device)[None],
                use_cache=False,
            ).last_hidden_state[0]
        picked = hidden[torch.from_numpy(packed.head).to(device)]
        weight = self._model.get_output_embeddings().weight
        return head_forward(picked, weight, heads_of(packed, self._temperature, device)).logprobs
