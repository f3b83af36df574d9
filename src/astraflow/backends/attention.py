"""Attention of a packed row: every token sees its own prefix in the tree and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from astraflow.trainer.packing import PackedRow


class TreeAttention:
    """Gives the model the mask of a packed row."""

    def __init__(self, model: Any) -> None:
        self._device = model.get_input_embeddings().weight.device

    @contextmanager
    def of(self, packed: PackedRow) -> Iterator[Tensor]:
        """bool [1, 1, L, L] for a forward within the context."""
        yield torch.from_numpy(packed.may_attend()).to(self._device)[None, None]
