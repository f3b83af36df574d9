"""A critic's share: advantages and returns on packed tokens, lambda by length, positive examples, value losses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from astraflow.errors import ConfigError, InvalidRecord
from astraflow.losses import LossInputs
from astraflow.losses.gae import explained_variance, gae, judged, length_adaptive_lambda, returns_of
from astraflow.losses.vapo import prepare, value_pretraining, vapo
from tests.unit.losses.lab import batch
from tests.unit.losses.plain import clipped, sequences_of
from tests.unit.losses.test_losses import make


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


ALL = torch.tensor([True, True, True])
ONE = torch.tensor([0, 0, 0])


# ── advantages ──


@pytest.mark.parametrize("masked_value", [100.0, -7.0, math.nan])
def test_f30_the_value_of_a_masked_token_leaks_nowhere(masked_value: float) -> None:
    mask = torch.tensor([True, True, False])
    found = gae(f64(0, 1, 0), f64(0, 0, masked_value), mask, ONE, lam=0.95)
    assert found.tolist() == pytest.approx([0.95, 1.0, 0.0])


def test_f30_a_masked_token_between_two_is_skipped_not_a_step() -> None:
    mask = torch.tensor([True, False, True])
    found = gae(f64(0, math.nan, 1), f64(0.5, math.nan, 0.25), mask, ONE, lam=0.5, gamma=0.9)
    together = gae(f64(0, 1), f64(0.5, 0.25), torch.tensor([True, True]), torch.tensor([0, 0]), lam=0.5, gamma=0.9)
    assert [found[0], found[2]] == pytest.approx(together.tolist()) and float(found[1]) == 0.0


@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
def test_advantages_are_the_weighed_sum_of_the_deltas(lam: float) -> None:
    rewards, values, gamma = f64(0.1, -0.2, 1.0), f64(0.3, 0.5, -0.1), 0.9
    nexts = [0.5, -0.1, 0.0]
    deltas = [float(rewards[t]) + gamma * nexts[t] - float(values[t]) for t in range(3)]
    expected = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, 3)) for t in range(3)]
    assert gae(rewards, values, ALL, ONE, lam=lam, gamma=gamma).tolist() == pytest.approx(expected)


def test_sequences_do_not_see_each_other_however_they_are_packed() -> None:
    rewards, values = f64(0, 1, 0, 0, 2), f64(0.1, 0.2, 0.3, 0.4, 0.5)
    ids, mask = torch.tensor([0, 0, 1, 1, 1]), torch.ones(5, dtype=torch.bool)
    packed = gae(rewards, values, mask, ids, lam=0.9)
    apart = [gae(rewards[p], values[p], mask[p], ids[p], lam=0.9) for p in (slice(0, 2), slice(2, 5))]
    assert packed.tolist() == pytest.approx(torch.cat(apart).tolist())
    mixed = torch.tensor([2, 0, 3, 1, 4])
    again = gae(rewards[mixed], values[mixed], mask, ids[mixed], lam=0.9)
    assert again.tolist() == pytest.approx(packed[mixed].tolist())


def test_every_token_may_have_its_own_lambda() -> None:
    rewards, values = f64(0, 0, 1), f64(0, 0, 0)
    assert gae(rewards, values, ALL, ONE, lam=f64(0.5, 0.25, 0)).tolist() == pytest.approx([0.125, 0.25, 1.0])


def test_returns_are_what_comes_and_lambda_one_agrees() -> None:
    rewards, values = f64(1, 0, 2), f64(0.3, -5, 7)
    assert returns_of(rewards, ALL, ONE, gamma=0.5).tolist() == [1.5, 1.0, 2.0]
    full = gae(rewards, values, ALL, ONE, lam=1.0) + values
    assert full.tolist() == pytest.approx(returns_of(rewards, ALL, ONE).tolist())


def test_nothing_at_all_is_nothing() -> None:
    empty = torch.zeros(0, dtype=torch.float64)
    none = torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64)
    assert len(gae(empty, empty, *none, lam=0.9)) == 0
    assert gae(f64(1, 1, 1), f64(1, 1, 1), ~ALL, ONE, lam=0.9).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("name", "value"), [("lam", 1.5), ("lam", -0.1), ("lam", math.nan), ("gamma", 1.01)])
def test_factors_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"{name} must be in \[0, 1\], found"):
        gae(f64(0, 0, 0), f64(0, 0, 0), ALL, ONE, **{"lam": 0.9, name: value})


# ── lambda by length ──


@pytest.mark.parametrize(("length", "expected"), [(1, 0.0), (19, 0.0), (20, 0.0), (40, 0.5), (200, 0.9), (2000, 0.99)])
def test_lambda_grows_with_the_length(length: int, expected: float) -> None:
    mask, ids = torch.ones(length, dtype=torch.bool), torch.zeros(length, dtype=torch.int64)
    assert length_adaptive_lambda(mask, ids).tolist() == pytest.approx([expected] * length)


def test_lambda_counts_the_unmasked_tokens_of_its_own_sequence() -> None:
    mask = torch.tensor([True, True, False, True, True, True, True])
    ids = torch.tensor([0, 0, 0, 4, 4, 4, 4])
    assert length_adaptive_lambda(mask, ids, alpha=1.0).tolist() == pytest.approx([0.5] * 3 + [0.75] * 4)


def test_the_weights_of_the_deltas_sum_to_alpha_times_the_length() -> None:
    length, alpha = 4000, 0.05
    ids = torch.zeros(length, dtype=torch.int64)
    lam = float(length_adaptive_lambda(torch.ones(length, dtype=torch.bool), ids, alpha=alpha)[0])
    assert sum(lam**t for t in range(length)) == pytest.approx(alpha * length, rel=1e-6)


def test_alpha_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="alpha must be > 0, found 0"):
        length_adaptive_lambda(ALL, ONE, alpha=0)


# ── the loss ──


def critic(inputs: LossInputs, values: Any, returns: Any, old: Any = None) -> LossInputs:
    found, wanted = f64(*values).requires_grad_(), f64(*returns)
    return replace(inputs, values=found, returns=wanted, old_values=f64(*(values if old is None else old)))


def test_closed_form() -> None:
    """Two tokens of a right answer, one of a wrong one: PPO by token, likelihood of the right, squared errors."""
    inputs = critic(
        make([-0.5, -1.5, 0.0], behaviour=[-0.5, -1.5, 0.0], sequences=[0, 0, 1]), (0.5, 1, 0.25), (1, 1, 0)
    )
    out = vapo(inputs, nll_weight=0.1, value_weight=0.5)
    assert float(out.loss.detach()) == pytest.approx(-1 + 0.1 * 1.0 + 0.5 * (0.25 + 0 + 0.0625) / 2 / 3)
    torch.autograd.backward(out.loss)
    assert inputs.logprobs.grad is not None and inputs.values is not None and inputs.values.grad is not None
    assert inputs.logprobs.grad.tolist() == pytest.approx([-1 / 3 - 0.05, -1 / 3 - 0.05, -1 / 3])
    assert inputs.values.grad.tolist() == pytest.approx([0.5 * -0.5 / 3, 0, 0.5 * 0.25 / 3])
    assert out.metrics["loss/positive_logprob"] == (-2.0, 2.0)
    assert out.metrics["loss/value"] == (pytest.approx(0.15625), 3.0)


def test_the_denominator_of_the_likelihood_is_the_whole_batches() -> None:
    whole = critic(make([-1.0, -2.0, -4.0], advantages=[0, 0, 0], sequences=[0, 1, 2]), (0, 0, 0), (1, 1, 0))
    decided = replace(prepare(whole), batch_tokens=3, batch_sequences=3)
    assert decided.batch_chosen == 2
    columns = (
        "logprobs",
        "behaviour_logprobs",
        "advantages",
        "mask",
        "sequence_ids",
        "values",
        "old_values",
        "returns",
    )
    options = {"nll_weight": 1.0, "value_weight": 0.0}
    parts = [replace(decided, **{c: getattr(decided, c)[n : n + 1] for c in columns}) for n in range(3)]
    losses = [float(vapo(part, **options).loss.detach()) for part in parts]  # type: ignore[arg-type]
    assert losses == pytest.approx([0.5, 1.0, 0.0])
    assert sum(losses) == pytest.approx(float(vapo(whole, **options).loss.detach()))  # type: ignore[arg-type]


def test_positive_is_above_the_threshold() -> None:
    inputs = critic(make([-1.0, -2.0], advantages=[0, 0], sequences=[0, 1]), (0, 0), (0.5, 0.6))
    options = {"nll_weight": 1.0, "value_weight": 0.0, "positive_above": 0.5}
    assert float(vapo(inputs, **options).loss.detach()) == pytest.approx(2.0)


def test_value_clip_takes_the_worse_of_the_two() -> None:
    """V = .9 left the old .2 by more than .1: (.3 - 1)² against (.9 - 1)²; then V = .9 beyond a goal of 0."""
    for goal, expected in ((1.0, 0.49), (0.0, 0.81)):
        inputs = critic(make([0.0], advantages=[0]), (0.9,), (goal,), old=(0.2,))
        out = vapo(inputs, nll_weight=0.0, value_clip=0.1)
        assert float(out.loss.detach()) == pytest.approx(expected / 2)


@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradients_are_those_of_the_plain_formula(seed: int) -> None:
    inputs = batch(seed)
    assert inputs.values is not None
    leaves = [inputs.logprobs.clone().requires_grad_(), inputs.values.clone().requires_grad_()]
    terms, likely, errors = [], [], []
    for s in sequences_of(replace(inputs, logprobs=leaves[0], values=leaves[1])):
        terms.append(clipped(torch.exp(s.now - s.then), s.advantage, 0.8, 1.28))
        likely.append(-s.now[s.goal > 0])
        near = s.old_value + torch.clip(s.value - s.old_value, -0.2, 0.2)
        errors.append(torch.maximum((s.value - s.goal) ** 2, (near - s.goal) ** 2) / 2)
    expected = torch.cat(terms).mean() + 0.1 * torch.cat(likely).mean() + 0.7 * torch.cat(errors).mean()
    torch.autograd.backward(expected)
    mine = [inputs.logprobs.clone().requires_grad_(), inputs.values.clone().requires_grad_()]
    out = vapo(replace(inputs, logprobs=mine[0], values=mine[1]), value_weight=0.7, value_clip=0.2)
    torch.autograd.backward(out.loss)
    assert float(out.loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-12)
    for leaf, own in zip(leaves, mine, strict=True):
        torch.testing.assert_close(own.grad, leaf.grad, atol=1e-12, rtol=0)


# ── value pretraining ──


def test_pretraining_moves_the_critic_and_leaves_the_policy_alone() -> None:
    inputs = critic(make([0.3, 0.2, 0.1], mask=[True, True, False]), (0.5, 1, 9), (1, 0, 0))
    out = value_pretraining(inputs)
    torch.autograd.backward(out.loss)
    assert float(out.loss.detach()) == pytest.approx((0.25 + 1) / 2 / 2)
    assert inputs.values is not None and inputs.values.grad is not None and inputs.logprobs.grad is None
    assert inputs.values.grad.tolist() == pytest.approx([-0.25, 0.5, 0.0])


def test_pretraining_fits_a_critic_to_the_returns() -> None:
    features = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    goal = features @ f64(1.0, -2.0, 0.5)
    weights = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    everything = torch.ones(12, dtype=torch.bool)
    before = explained_variance((features @ weights).detach(), goal, everything)
    optimiser = torch.optim.Adam([weights], lr=0.1)
    for _ in range(200):
        values = features @ weights
        inputs = replace(make([0.0] * 12), values=values, old_values=values.detach(), returns=goal)
        optimiser.zero_grad()
        torch.autograd.backward(value_pretraining(inputs).loss)
        optimiser.step()
    after = explained_variance((features @ weights).detach(), goal, everything)
    assert before is not None and after is not None and before < 0.1 and after > 0.99


def test_how_good_values_are() -> None:
    """Deviations over all of the mask; the error beside that of saying 0: (1 + 1) / (1 + 9)."""
    mask = torch.tensor([True, True, False])
    found = judged(f64(0, 2, 99), f64(1, 3, -99), mask)
    expected = {"value_deviation": 1.0, "return_deviation": 1.0, "explained_variance": 1.0, "relative_error": 0.2}
    assert found == pytest.approx(expected)
    assert judged(f64(0, 0, 0), f64(1, 3, 0), mask) == pytest.approx(
        {"value_deviation": 0.0, "return_deviation": 1.0, "explained_variance": 0.0, "relative_error": 1.0}
    ), "as a critic begins"
    assert judged(f64(1, 2, 0), f64(0, 0, 0), mask) == {"value_deviation": 0.5, "return_deviation": 0.0}
    assert judged(f64(1), f64(1), torch.tensor([False])) == {}


def test_explained_variance() -> None:
    goal = f64(0, 1, 2, math.nan)
    mask = torch.tensor([True, True, True, False])
    assert explained_variance(f64(0, 1, 2, 5), goal, mask) == pytest.approx(1.0)
    assert explained_variance(f64(7, 7, 7, 5), goal, mask) == pytest.approx(0.0)
    assert explained_variance(f64(2, 1, 0, 5), goal, mask) == pytest.approx(-3.0)
    assert explained_variance(f64(1, 2, 3, 4), f64(1, 1, 1, 1), mask) is None
    assert explained_variance(f64(1), f64(1), torch.tensor([True])) is None


# ── without a critic ──


@pytest.mark.parametrize("column", ["values", "old_values", "returns"])
def test_what_is_missing_is_named(column: str) -> None:
    inputs = replace(batch(), **{column: None})  # type: ignore[arg-type]
    for call in (vapo, value_pretraining, prepare)[: 2 + (column == "returns")]:
        with pytest.raises(InvalidRecord, match=rf"LossInputs\.{column}: "):
            call(inputs)
