"""Two processes over gloo, each with its own sequences, get the gradient of one process that has them all."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from astraflow.losses import LOSSES, LossInputs
from tests.unit.losses.lab import COLUMNS, batch, evaluate, of_sequences, take
from tests.unit.losses.plain import EVERY

SHARES = ((0, 1), (2, 3))
"""Pairs stay together; lengths 3 and 1 against 4 and 2."""
CASES = [(name, options) for name, case in EVERY.items() for options in case.options]
WEIGHTS = 5


def features(count: int) -> Tensor:
    return torch.randn(count, WEIGHTS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gathered(own: LossInputs) -> LossInputs:
    """The whole batch, from what each process has: [N] differ, so that every column goes padded, with its length."""
    count = torch.tensor([len(own.mask)])
    counts = [torch.zeros_like(count) for _ in SHARES]
    distributed.all_gather(counts, count)
    most = max(int(each) for each in counts)
    whole: dict[str, Any] = {}
    for name in COLUMNS:
        column = getattr(own, name)
        if column is None:
            continue
        padded = torch.zeros(most, dtype=torch.float64)
        padded[: len(column)] = column.detach().double()
        every = [torch.zeros_like(padded) for _ in SHARES]
        distributed.all_gather(every, padded)
        parts = [each[: int(n)] for each, n in zip(every, counts, strict=True)]
        whole[name] = torch.cat(parts).to(column.dtype)
    return replace(own, **whole)


def gradient_of_rank(rank: int, name: str, options: dict[str, Any]) -> Tensor:
    """Of shared weights, summed over the processes."""
    every = batch(11)
    own = take(every, of_sequences(every, SHARES[rank]))
    inner = features(len(every.mask))[of_sequences(every, SHARES[rank])]
    whole = gathered(own)
    prepare = LOSSES[name].prepare
    decided = whole if prepare is None else prepare(whole, **options)
    begin = 0 if rank == 0 else len(whole.mask) - len(own.mask)
    part = take(decided, torch.arange(begin, begin + len(own.mask)))
    counts = torch.tensor([int(own.mask.sum()), len(torch.unique(own.sequence_ids[own.mask]))])
    distributed.all_reduce(counts)
    leaf = own.logprobs.clone().requires_grad_()
    part = replace(part, logprobs=leaf, prepared=True, batch_tokens=int(counts[0]), batch_sequences=int(counts[1]))
    loss = LOSSES[name].loss(part, **options).loss
    if loss.requires_grad:
        torch.autograd.backward(loss)
    gradient = torch.zeros(WEIGHTS, dtype=torch.float64) if leaf.grad is None else inner.T @ leaf.grad
    distributed.all_reduce(gradient)
    return gradient


def process(rank: int, meet: str, answers: Any) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=len(SHARES))
    found = [gradient_of_rank(rank, name, options).tolist() for name, options in CASES]
    answers.put((rank, found))
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Sequence[list[float]]]:
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    meet = str(tmp_path_factory.mktemp("gloo") / Path("meet"))
    children = [spawn.Process(target=process, args=(rank, meet, answers), daemon=True) for rank in range(len(SHARES))]
    for child in children:
        child.start()
    try:
        found = dict(answers.get(timeout=100) for _ in children)
        for child in children:
            child.join(timeout=20)
    finally:
        for child in children:
            child.kill()
    return found


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{name}-{n}" for n, (name, _) in enumerate(CASES)])
def test_world_size_does_not_matter(index: int, of_two: dict[int, Sequence[list[float]]]) -> None:
    name, options = CASES[index]
    every = batch(11)
    alone = features(len(every.mask)).T @ evaluate(name, every, options).gradient
    for found in of_two.values():
        assert found[index] == pytest.approx(alone.tolist(), abs=1e-10)
    assert of_two[0][index] == of_two[1][index]
