"""The second moment of a batch: what is masked, by whose statistics, and what then is trained."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from astraflow.errors import ConfigError, InvalidRecord
from astraflow.losses import LossInputs
from astraflow.losses.m2po import m2po, prepare
from tests.unit.losses.lab import batch, of_sequences, take
from tests.unit.losses.test_losses import make


def kept(log_ratios: list[float], **more: Any) -> list[bool]:
    budget = more.pop("budget", 0.04)
    found = prepare(make(log_ratios, **more), budget=budget).kept
    assert found is not None
    answer: list[bool] = found.tolist()
    return answer


def test_f49_the_budget_is_the_batches_not_the_micro_batches() -> None:
    """(.01 * 3 + .09) / 4 = .03 is within .04; the second part alone would have .05 and lose its last token."""
    whole = make([0.1, 0.1, 0.1, 0.3], sequences=[0, 0, 1, 1])
    assert kept([0.1, 0.1, 0.1, 0.3]) == [True] * 4
    assert kept([0.1, 0.3]) == [True, False]
    decided = replace(prepare(whole), batch_tokens=4, batch_sequences=2)
    for parts in ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[2, 3], [0, 1]]):
        total = sum(float(m2po(take(decided, torch.tensor(part))).loss.detach()) for part in parts)
        assert total == pytest.approx(-(3 * math.exp(0.1) + math.exp(0.3)) / 4)


def test_f49_a_part_alone_is_refused() -> None:
    with pytest.raises(InvalidRecord, match="before the loss's prepare had seen the whole batch"):
        m2po(replace(make([0.1, 0.3]), batch_tokens=4, batch_sequences=2))


@pytest.mark.parametrize(
    ("log_ratios", "advantages", "expected"),
    [
        ([0.9, 0.1], [1, 1], [False, True]),
        ([-0.9, 0.1], [1, 1], [True, True]),
        ([-0.9, -0.1], [-1, -1], [False, True]),
        ([0.9, -0.1], [-1, -1], [True, True]),
        ([0.9, 0.1], [0, 1], [True, True]),
    ],
)
def test_only_tokens_are_considered_on_which_a_clip_would_act(
    log_ratios: list[float], advantages: list[float], expected: list[bool]
) -> None:
    assert kept(log_ratios, advantages=advantages) == expected


def test_the_largest_go_until_the_mean_of_the_rest_is_within_the_budget() -> None:
    moments = [0.01, 0.04, 0.09, 0.25, 1.0]
    for budget, count in ((0.278, 5), (0.277, 4), (0.0975, 4), (0.05, 3), (0.04, 2), (0.02, 1), (0.009, 0), (0.0, 0)):
        found = kept([math.sqrt(each) for each in moments], budget=budget)
        assert found == [True] * count + [False] * (5 - count), budget


def test_a_mean_that_is_the_budget_up_to_rounding_is_within_it() -> None:
    assert kept([0.2, 0.2, 0.2]) == [True] * 3, "0.2 squared is 0.04000000000000001"
    assert kept([0.2 * (1 + 1e-9)]) == [False]


def test_equal_ones_stay_or_go_together() -> None:
    """Two of .09 with two of .01: one of them would fit, but which would be an accident of order."""
    assert kept([0.3, 0.1, 0.3, 0.1]) == [False, True, False, True]


def test_data_masked_tokens_are_in_no_statistic_and_nan_there_is_nothing() -> None:
    assert kept([0.1, 9.0, math.nan], mask=[True, False, False])[0]
    assert kept([0.3, 0.0], mask=[True, False]) == [False, True]


def test_masked_tokens_stay_in_the_denominator_and_get_no_gradient() -> None:
    inputs = make([0.1, 2.0, -0.5], advantages=[1, 1, 1])
    out = m2po(inputs)
    torch.autograd.backward(out.loss)
    assert float(out.loss.detach()) == pytest.approx(-(math.exp(0.1) + math.exp(-0.5)) / 3)
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.tolist() == pytest.approx([-math.exp(0.1) / 3, 0.0, -math.exp(-0.5) / 3])
    assert out.metrics["loss/clip_fraction"] == (1.0, 3.0)
    assert out.metrics["loss/second_moment"] == (pytest.approx(0.01), 1.0)


def brute(inputs: LossInputs, budget: float) -> list[bool]:
    """One token after the other, the largest first."""
    change = (inputs.logprobs - inputs.behaviour_logprobs).detach()
    considered = [n for n in range(len(change)) if inputs.mask[n] and float(inputs.advantages[n] * change[n]) > 0]
    left = sorted(considered, key=lambda n: float(change[n]) ** 2)
    while left and sum(float(change[n]) ** 2 for n in left) / len(left) > budget * (1 + 1e-12):
        left.pop()
    return [n in left or n not in considered for n in range(len(change))]


@given(seed=st.integers(0, 10_000), budget=st.floats(0.001, 0.3), order=st.permutations([0, 1, 2, 3]))
@settings(max_examples=50, deadline=None)
def test_the_choice_is_that_of_masking_one_by_one_in_every_order(seed: int, budget: float, order: list[int]) -> None:
    inputs = batch(seed)
    found = prepare(inputs, budget=budget).kept
    assert found is not None and found.tolist() == brute(inputs, budget)
    index = of_sequences(inputs, order)
    again = prepare(take(inputs, index), budget=budget).kept
    assert again is not None and again.tolist() == found[index].tolist()


@pytest.mark.parametrize("budget", [0.04, 0.2])
@pytest.mark.parametrize("seed", range(4))
def test_value_and_gradient_are_those_of_the_plain_formula(seed: int, budget: float) -> None:
    inputs = batch(seed)
    leaf: Tensor = inputs.logprobs.clone().requires_grad_()
    left = brute(inputs, budget)
    terms = [
        -inputs.advantages[n] * torch.exp(leaf[n] - inputs.behaviour_logprobs[n])
        for n in range(len(left))
        if left[n] and inputs.mask[n]
    ]
    expected = torch.stack(terms).sum() / int(inputs.mask.sum())
    torch.autograd.backward(expected)
    mine = replace(inputs, logprobs=inputs.logprobs.clone().requires_grad_())
    out = m2po(mine, budget=budget)
    torch.autograd.backward(out.loss)
    assert float(out.loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-12)
    torch.testing.assert_close(mine.logprobs.grad, leaf.grad, atol=1e-12, rtol=0)


def test_budget_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="budget must be finite and >= 0, found -1"):
        m2po(make([0.0]), budget=-1)
