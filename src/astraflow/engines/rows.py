"""One forward pass over many sequences: flat rows, one token each, and what a model must offer to compute them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from astraflow.types import Array


@dataclass(frozen=True, slots=True)
class Segment:
    """``count`` rows of one sequence: positions ``start`` to ``start + count`` of ``slot``."""

    slot: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows in the order of ``segments``: those of one row first (decode), then the longer ones (prefill).

    Logits are wanted for the last row of each segment whose ``wanted`` is True.
    """

    tokens: Array
    """int64 [N]"""
    segments: tuple[Segment, ...]
    wanted: tuple[bool, ...]


class PastCopies(Protocol):
    """Of a model whose past can be copied by token."""

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Let ``target`` remember the first ``length`` tokens of ``source``."""

    def save_prefix(self, slot: int, length: int) -> Any:
        """A copy of the first ``length`` tokens of ``slot``, for ``restore_prefix``."""

    def restore_prefix(self, saved: Any, slot: int, length: int) -> None: ...


class Model(Protocol):
    """A causal LM with a memory of the past per slot. Used by the decode thread, except for ``prepare``."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def context(self) -> int:
        """Longest sequence that the model was made for."""

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """A weight set from the tensors of a checkpoint, on any thread. Raises WeightsRefused."""

    def tensors(self, weights: Any) -> Iterable[tuple[str, torch.Tensor]] | None:
        """The counterpart of ``prepare``: what is computed with, by the checkpoint's names; a tied tensor need not come
        under its second name. None: it cannot be shown."""

    def forward(self, weights: Any, rows: Rows) -> torch.Tensor:
        """[number wanted, V] logits; the rows' past is remembered in their slots."""

    @property
    def copies(self) -> PastCopies | None:
        """How to copy what a slot remembers; None: it cannot be copied, every prompt is computed."""

    def forget(self, slot: int) -> None:
        """The slot starts anew."""
