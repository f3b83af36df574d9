"""Before the first step: does this model compute packed rows as it computes separate ones? Milliseconds, in fp32."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from astraflow.backends.attention import TreeAttention
from astraflow.errors import ConfigError
from astraflow.trainer.packing import pack
from astraflow.types import Row

TOLERANCE = 1e-3
"""Of hidden states and logits, relative to the largest; a leak or another position changes them by 0.1 and more."""
ROWS = ([0, 1, 2, 3, 4, 5], [0, 1, 2, 5, 3, 1], [0, 1, 4, 2], [3, 2, 1, 0, 4])


@torch.no_grad()
def check_packing(model: Any, attention: TreeAttention, plain_attention: str = "sdpa") -> None:
    """Raises ConfigError where tokens see more than their own past (state-space layers, for example), or where logits
    are more than hidden states times the output embedding (soft caps, scales, a bias)."""
    rows = [np.array(row, np.int32) % model.get_input_embeddings().weight.shape[0] for row in ROWS]
    (packed,) = pack([_row(tokens) for tokens in rows], tokens_per_micro_batch=1000)
    tokens, positions = torch.from_numpy(packed.tokens)[None], torch.from_numpy(packed.positions)[None]
    device = model.get_input_embeddings().weight.device
    with attention.of(packed) as mask:
        hidden = model.base_model(
            inputs_embeds=model.get_input_embeddings().weight[tokens.to(device)],
            attention_mask=mask,
            position_ids=positions.to(device),
            use_cache=False,
        ).last_hidden_state[0]
    ours = hidden @ model.get_output_embeddings().weight.T
    heads = torch.from_numpy(packed.head)[torch.from_numpy(packed.target_head)].to(device)
    with attention.plain(plain_attention):
        for n, row in enumerate(rows):
            logits = model(input_ids=torch.from_numpy(row)[None].long().to(device), use_cache=False).logits[0, :-1]
            found = ours[heads[torch.from_numpy(packed.sequence == n).to(device)]]
            worst = float((found - logits).abs().max() / logits.abs().max().clamp(min=1.0))
            if not worst < TOLERANCE:
                raise ConfigError(
                    f"{type(model).__name__} cannot be trained on packed rows: their logits differ from those of "
                    f"separate rows by {worst:.2g} of the largest; its layers or its head do more than attention to "
                    "the own past and a linear output"
                )


def _row(tokens: Any) -> Row:
    mask = np.ones(len(tokens), np.bool_)
    mask[0] = False
    return Row(sample_id="check", tokens=tokens, mask=mask, logprobs=np.zeros(len(tokens), np.float32))
