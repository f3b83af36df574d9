"""What every loss is held against: batches of all columns, evaluated whole or in parts.

A loss joins by its line in ``astraflow.losses.LOSSES``; its options worth testing and its plain formula stand in
``plain.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from astraflow.losses import LOSSES, LossInputs
from astraflow.observe.metrics import merge_means

LENGTHS = (3, 1, 4, 2)
COLUMNS = tuple(each.name for each in fields(LossInputs) if "Tensor" in str(each.type))


class Found(NamedTuple):
    loss: float
    gradient: Tensor
    """[N] of the log-probs"""
    values_gradient: Tensor
    """[N] of the critic's values"""
    metrics: dict[str, float]


def batch(
    seed: int = 0,
    *,
    lengths: Sequence[int] = LENGTHS,
    spread: float = 0.3,
    dtype: torch.dtype = torch.float64,
    masked: Sequence[int] = (2,),
    reward: float | None = None,
) -> LossInputs:
    """Every column filled. Sequences 0 and 1, 2 and 3 are pairs. ``masked``: tokens that data masks.

    ``spread``: deviation of every log-ratio. ``reward``: the advantage of every token; None: one a sequence, drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    n = len(ids)

    def draw() -> Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64)

    behaviour = -1.5 + 0.5 * draw()
    drawn = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    drawn = drawn - drawn.mean()
    values = draw()
    mask = torch.ones(n, dtype=torch.bool)
    mask[[each for each in masked if each < n]] = False
    columns = {
        "logprobs": behaviour + spread * draw(),
        "behaviour_logprobs": behaviour,
        "advantages": drawn[ids] if reward is None else torch.full((n,), reward),
        "proximal_logprobs": behaviour + spread * draw(),
        "reference_logprobs": behaviour + spread * draw(),
        "values": values,
        "old_values": values + spread * draw(),
        "returns": values + draw(),
    }
    return LossInputs(
        mask=mask,
        sequence_ids=ids,
        ages=torch.randint(0, 4, (n,), generator=generator),
        pairs=ids // 2,
        **{name: column.to(dtype) for name, column in columns.items()},
    )


def take(inputs: LossInputs, index: Tensor, **changed: Any) -> LossInputs:
    """The tokens of ``index``, in its order."""
    columns = {name: getattr(inputs, name) for name in COLUMNS}
    cut = {name: None if column is None else column[index] for name, column in columns.items()}
    return replace(inputs, **{**cut, **changed})


def of_sequences(inputs: LossInputs, sequences: Sequence[int]) -> Tensor:
    """Index of the tokens of these sequences, one sequence after the other."""
    return torch.cat([(inputs.sequence_ids == each).nonzero()[:, 0] for each in sequences])


def prepared(name: str, inputs: LossInputs, options: dict[str, Any]) -> LossInputs:
    """After the loss's decisions over the whole batch, without a gradient, with its denominators."""
    prepare = LOSSES[name].prepare
    whole = inputs if prepare is None else prepare(inputs, **options)
    ids = inputs.sequence_ids[inputs.mask]
    return replace(whole, batch_tokens=int(inputs.mask.sum()), batch_sequences=len(torch.unique(ids)), prepared=True)


def evaluate(name: str, inputs: LossInputs, options: dict[str, Any], parts: Sequence[Tensor] | None = None) -> Found:
    """``parts`` None: one call that is given the whole batch. Else a call a part, each differentiated by itself."""
    logprobs = inputs.logprobs.detach().clone().requires_grad_()
    assert inputs.values is not None
    values = inputs.values.detach().clone().requires_grad_()
    metrics, total = [], 0.0
    whole = inputs if parts is None else prepared(name, inputs, options)
    for index in [torch.arange(len(logprobs))] if parts is None else parts:
        output = LOSSES[name].loss(take(whole, index, logprobs=logprobs[index], values=values[index]), **options)
        assert output.loss.shape == ()
        if output.loss.requires_grad:
            torch.autograd.backward(output.loss)
        total += float(output.loss.detach())
        metrics.append(output.metrics)
    zeros = torch.zeros_like(logprobs)
    gradients = [zeros if leaf.grad is None else leaf.grad for leaf in (logprobs, values)]
    return Found(total, gradients[0], gradients[1], merge_means(metrics))
