"""Torch tensors take part in deltas by their own memory."""

from __future__ import annotations

import pytest
import torch

from astraflow.errors import FullTransferNeeded
from astraflow.weights.delta import apply_delta, encode_delta, read_header
from astraflow.weights.delta_torch import as_bits

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.int8)


def test_what_a_delta_writes_is_what_torch_sees() -> None:
    generator = torch.Generator().manual_seed(0)
    base = {str(dtype): torch.randn(40, 8, generator=generator).mul(9).to(dtype) for dtype in DTYPES}
    base["tied"] = base["torch.bfloat16"]
    new = {name: tensor.clone() for name, tensor in base.items()}
    for tensor in new.values():
        tensor[3, 2] += 2
    new["torch.bfloat16"][0, :4] = torch.tensor([-0.0, float("nan"), float("inf"), -float("inf")])
    new["tied"] = new["torch.bfloat16"]
    delta = encode_delta(as_bits(base), as_bits(new))
    assert read_header(delta).changed == len(DTYPES) + 4
    parameters = {name: torch.nn.Parameter(t, requires_grad=t.is_floating_point()) for name, t in base.items()}
    apply_delta(as_bits(parameters), delta)
    for name, tensor in new.items():
        same = parameters[name].detach().view(torch.uint8), tensor.view(torch.uint8)
        assert torch.equal(*same) and torch.equal(base[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_model_with_a_tied_head_stays_tied() -> None:
    """F74: logits of trainer and receiver are equal, the change travels once."""

    def model(seed: int) -> tuple[torch.nn.Embedding, torch.nn.Linear]:
        torch.manual_seed(seed)
        embed, head = torch.nn.Embedding(12, 6), torch.nn.Linear(6, 12, bias=False)
        head.weight = embed.weight
        return embed, head

    sender, receiver = model(0), model(0)
    base = {"embed": receiver[0].weight, "head": receiver[1].weight}
    with torch.no_grad():
        sender[0].weight[1, 0] += 1
    new = {"embed": sender[0].weight, "head": sender[1].weight}
    delta = encode_delta(as_bits(base), as_bits(new))
    apply_delta(as_bits(base), delta)
    ids = torch.arange(12)
    assert torch.equal(receiver[1](receiver[0](ids)), sender[1](sender[0](ids)))
    assert receiver[0].weight is receiver[1].weight and read_header(delta).changed == 1


def test_memory_that_cannot_be_written_as_one_piece_is_refused() -> None:
    with pytest.raises(FullTransferNeeded, match="tensor w"):
        as_bits({"w": torch.zeros(4, 6).T})
