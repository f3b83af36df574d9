"""What a loss sees and what it answers: packed 1-D tensors over tokens, no padding, no model.

A loss is a pure function ``loss(inputs, **options) -> LossOutput``. It may be called on parts of a batch: the
denominators are those of the whole batch, so that the sum over the parts is the loss of the batch. N: tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from astraflow.errors import InvalidRecord
from astraflow.loss_options import check_options

F = TypeVar("F", bound=Callable[..., Any])
FLAGS = ("mask", "kept")
NUMBERS = ("sequence_ids", "ages", "pairs")
"""Columns of ``LossInputs`` that hold no floats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """One value a token, all of one length. Only ``logprobs`` (and ``values``, of a critic) has a gradient."""

    logprobs: Tensor
    """[N] current log-probs of the tokens that were sampled (rl) or are targets (supervised)."""
    behaviour_logprobs: Tensor
    """[N] log-probs under the policy that sampled them; 0 if supervised."""
    advantages: Tensor
    """[N]"""
    mask: Tensor
    """bool [N]: False where *data* masks the token (stale, truncated, failed, not sampled): not in a denominator."""
    sequence_ids: Tensor
    """int64 [N]: which sequence a token is of. A sequence is never split over two calls, its tokens are in order."""
    batch_tokens: int | None = None
    """Unmasked tokens of the whole batch; None: these inputs are the whole batch."""
    batch_sequences: int | None = None
    """Sequences with at least one unmasked token in the whole batch; None as above."""
    prepared: bool = False
    """``whole_batch`` decisions are made: parts may follow. Only losses with a ``prepare`` look at it."""
    proximal_logprobs: Tensor | None = None
    """[N] log-probs by the trainer's own pass over the weights that the step starts from, without a gradient."""
    reference_logprobs: Tensor | None = None
    """[N] log-probs under version 0 of the policy, by the trainer's own pass."""
    kept: Tensor | None = None
    """bool [N]: what ``prepare`` has left after a choice over the whole batch; the others stay in denominators."""
    partner: Tensor | None = None
    """[N] by ``prepare``: what the other sequence of the pair has, at every token."""
    batch_chosen: int | None = None
    """By ``prepare``: how many it has chosen in the whole batch, where that is a denominator."""
    ages: Tensor | None = None
    """int64 [N]: versions between the one that sampled the token and the one that the step starts from."""
    pairs: Tensor | None = None
    """int64 [N]: which pair the token's sequence is of; -1: none."""
    values: Tensor | None = None
    """[N] the critic's values, with a gradient."""
    old_values: Tensor | None = None
    """[N] the critic's values when the returns were computed."""
    returns: Tensor | None = None
    """[N] what the values should be."""

    def __post_init__(self) -> None:
        self._check_types()
        shape = self.logprobs.shape
        columns = (self.behaviour_logprobs, self.advantages, self.mask, self.sequence_ids)
        prepared = (self.kept, self.partner, self.ages, self.pairs)
        policies = (self.proximal_logprobs, self.reference_logprobs)
        optional = (*policies, *prepared, self.values, self.old_values, self.returns)
        if len(shape) != 1 or any(each is not None and each.shape != shape for each in (*columns, *optional)):
            raise InvalidRecord(f"LossInputs: every tensor must be [N] of one N, found logprobs {list(shape)}")

    def _check_types(self) -> None:
        """Whole numbers for advantages would round what is computed of them, and for a mask they would be places."""
        for each in fields(self):
            column = getattr(self, each.name)
            if column is None or "Tensor" not in str(each.type):
                continue
            found = column.dtype if isinstance(column, Tensor) else None
            if each.name in FLAGS:
                kind, fits = "a bool tensor", found == torch.bool
            elif each.name in NUMBERS:
                kind, fits = "a tensor of whole numbers", found in (torch.int32, torch.int64)
            else:
                kind, fits = "a tensor of floats", found is not None and found.is_floating_point
            if not fits:
                said = type(column).__name__ if found is None else str(found).removeprefix("torch.")
                raise InvalidRecord(f"LossInputs.{each.name} must be {kind}, found {said}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """``loss`` is this part's share of the batch's loss; metrics can be added up over parts (F106)."""

    loss: Tensor
    """[] with a gradient; exactly 0 where there is nothing to train."""
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    """name → (sum, count)"""


def checked(loss: F) -> F:
    """Refuse options that ``loss_options`` does not allow for the loss of this name (ConfigError)."""

    @functools.wraps(loss)
    def call(inputs: LossInputs, **options: Any) -> Any:
        check_options(loss.__name__, options)
        return loss(inputs, **options)

    return cast("F", call)


def whole_batch(inputs: LossInputs, prepare: Callable[[LossInputs], LossInputs]) -> LossInputs:
    """``inputs`` after ``prepare``, if that was not done before. A loss with a ``prepare`` begins with this.

    Raises InvalidRecord for a part of a batch that nothing has prepared: its own statistics are not the batch's (F49).
    """
    if inputs.prepared:
        return inputs
    if inputs.batch_tokens is not None or inputs.batch_sequences is not None:
        raise InvalidRecord("LossInputs: a part of a batch came before the loss's prepare had seen the whole batch")
    return replace(prepare(inputs), prepared=True)
