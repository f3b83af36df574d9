"""Pairs: who is preferred, what the two halves of a pair add up to, and what has no preference."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from astraflow.errors import ConfigError, InvalidRecord
from astraflow.losses import LossInputs
from astraflow.losses.online_dpo import online_dpo, prepare
from tests.unit.losses.lab import batch, take
from tests.unit.losses.test_losses import make


def pair(logprobs: list[float], advantages: list[float], sequences: list[int], **more: Any) -> LossInputs:
    """Sequences 2n and 2n + 1 are a pair; the reference policy has log-prob 0 everywhere."""
    ids = torch.tensor(sequences)
    reference = torch.zeros(len(ids), dtype=torch.float64)
    given: dict[str, Any] = {"pairs": ids // 2, "reference_logprobs": reference, **more}
    return make(logprobs, advantages=advantages, sequences=sequences, **given)


def run(inputs: LossInputs, **options: Any) -> tuple[float, list[float], dict[str, tuple[float, float]]]:
    out = online_dpo(inputs, **options)
    torch.autograd.backward(out.loss)
    assert inputs.logprobs.grad is not None
    return float(out.loss.detach()), inputs.logprobs.grad.tolist(), out.metrics


def test_closed_form_of_one_pair() -> None:
    """D+ = -.2, D- = -.7 over two tokens: -log sigmoid(.5 * .5), its slope at every token of the two."""
    loss, gradient, metrics = run(pair([-0.2, -0.3, -0.4], [1, -1, -1], [0, 1, 1]), beta=0.5)
    assert loss == pytest.approx(-math.log(1 / (1 + math.exp(-0.25))))
    slope = 0.5 / (1 + math.exp(0.25))
    assert gradient == pytest.approx([-slope, slope, slope])
    assert metrics["loss/pair_margin"] == (pytest.approx(0.5), 1.0)
    assert metrics["loss/pair_right"] == (1.0, 1.0)


def test_the_higher_advantage_is_preferred_whichever_comes_first() -> None:
    first = run(pair([-0.2, -0.7], [0.3, 0.1], [0, 1]))
    second = run(pair([-0.7, -0.2], [0.1, 0.3], [0, 1]))
    assert first[0] == pytest.approx(second[0]) and first[1] == pytest.approx(second[1][::-1])
    assert first[1][0] < 0 < first[1][1]


def test_equals_have_no_preference_and_are_in_no_denominator() -> None:
    loss, gradient, metrics = run(pair([-0.2, -0.7], [0.5, 0.5], [0, 1]))
    assert (loss, gradient, metrics["loss/pair_margin"]) == (0.0, [0.0, 0.0], (0.0, 0.0))
    both = run(pair([-0.2, -0.7, -0.1, -0.9], [0.5, 0.5, 1, -1], [0, 1, 2, 3]))
    alone = run(pair([-0.1, -0.9], [1, -1], [2, 3]))
    assert both[0] == pytest.approx(alone[0]) and both[1] == [0.0, 0.0, *alone[1]]


def test_a_pair_of_which_data_masked_one_is_no_pair() -> None:
    inputs = pair([-0.2, -0.7, -0.1, -0.9], [1, -1, 1, -1], [0, 1, 2, 3], mask=[True, False, True, True])
    loss, gradient, _ = run(inputs)
    assert gradient[:2] == [0.0, 0.0] and gradient[2] < 0
    assert loss == pytest.approx(run(pair([-0.1, -0.9], [1, -1], [2, 3]))[0])


def test_sequences_without_a_pair_are_left_alone() -> None:
    inputs = pair([-0.2, -0.7, -0.5], [1, -1, 5], [0, 1, 2], pairs=torch.tensor([0, 0, -1]))
    loss, gradient, _ = run(inputs)
    assert gradient[2] == 0.0
    assert loss == pytest.approx(run(pair([-0.2, -0.7], [1, -1], [0, 1]))[0])


def test_the_two_of_a_pair_may_be_in_different_parts() -> None:
    whole = pair([-0.2, -0.3, -0.4, -0.8], [1, 1, -1, -1], [0, 0, 1, 1])
    expected = run(replace(whole, logprobs=whole.logprobs.detach().clone().requires_grad_()))
    decided = replace(prepare(whole), batch_tokens=4, batch_sequences=2)
    assert decided.batch_chosen == 1
    gradient, loss = [], 0.0
    for part in ([0, 1], [2, 3]):
        cut = take(decided, torch.tensor(part))
        found = run(replace(cut, logprobs=cut.logprobs.detach().clone().requires_grad_()))
        loss += found[0]
        gradient += found[1]
    assert loss == pytest.approx(expected[0]) and gradient == pytest.approx(expected[1])


def test_with_equal_rewards_everywhere_nothing_moves() -> None:
    inputs = batch(0, reward=0.25)
    assert set(run(replace(inputs, logprobs=inputs.logprobs.clone().requires_grad_()))[1]) == {0.0}


def test_far_apart_is_finite() -> None:
    for apart in (80.0, -80.0):
        loss, gradient, _ = run(pair([apart, -apart], [1, -1], [0, 1]), beta=5.0)
        assert loss == pytest.approx(0.0 if apart > 0 else 800.0) and all(map(math.isfinite, gradient))


@pytest.mark.parametrize("seed", range(5))
def test_value_and_gradient_are_those_of_the_plain_formula(seed: int) -> None:
    inputs = batch(seed, lengths=(2, 3, 1, 4), masked=(3, 7))
    leaf = inputs.logprobs.clone().requires_grad_()
    assert inputs.reference_logprobs is not None
    terms = []
    for first in (0, 2):
        distance = []
        for each in (first, first + 1):
            mine = (inputs.sequence_ids == each) & inputs.mask
            distance.append((leaf[mine] - inputs.reference_logprobs[mine]).sum())
        worth = [float(inputs.advantages[inputs.sequence_ids == each][0]) for each in (first, first + 1)]
        margin = distance[0] - distance[1] if worth[0] > worth[1] else distance[1] - distance[0]
        terms.append(-torch.log(1 / (1 + torch.exp(-0.3 * margin))))
    expected = torch.stack(terms).mean()
    torch.autograd.backward(expected)
    loss, gradient, _ = run(replace(inputs, logprobs=inputs.logprobs.clone().requires_grad_()), beta=0.3)
    assert loss == pytest.approx(float(expected.detach()), abs=1e-12)
    assert leaf.grad is not None and gradient == pytest.approx(leaf.grad.tolist(), abs=1e-12)


def test_three_sequences_are_no_pair() -> None:
    with pytest.raises(InvalidRecord, match="pair 0 has 3 sequences, a pair has two"):
        online_dpo(pair([-0.1] * 3, [1, 2, 3], [0, 1, 2], pairs=torch.tensor([0, 0, 0])))


@pytest.mark.parametrize("column", ["pairs", "reference_logprobs"])
def test_what_is_missing_is_named(column: str) -> None:
    with pytest.raises(InvalidRecord, match=column):
        online_dpo(replace(pair([-0.1, -0.2], [1, -1], [0, 1]), **{column: None}))  # type: ignore[arg-type]


def test_beta_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="beta must be finite and > 0, found 0"):
        online_dpo(pair([-0.1, -0.2], [1, -1], [0, 1]), beta=0)
