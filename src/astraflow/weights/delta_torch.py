"""Torch tensors as what deltas are made of and applied to: the same memory, seen as bits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from astraflow.errors import FullTransferNeeded
from astraflow.weights.tensors import Tensor, of_array


def as_bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, Tensor]:
    """Views: what a delta writes is what torch sees. Raises FullTransferNeeded unless contiguous and on the CPU."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        own = tensor.detach()
        if own.device.type != "cpu" or not own.is_contiguous():
            raise FullTransferNeeded(f"delta: tensor {name} does not lie in one piece on the CPU ({own.device})")
        if own.dtype is torch.bfloat16:
            found[name] = of_array(name, own.view(torch.int16).numpy().view(np.uint16), dtype="BF16")
        else:
            found[name] = of_array(name, own.numpy())
    return found
