"""Losses for stale data by numbers: closed forms on few tokens, and their plain formulas under autograd at float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from astraflow.errors import ConfigError, InvalidRecord
from astraflow.losses import LOSSES, LossInputs
from astraflow.losses.base import LossOutput
from astraflow.losses.decoupled_ppo import decoupled_ppo, interpolated
from astraflow.losses.kimi import kimi
from astraflow.losses.sapo import sapo
from astraflow.losses.topr import topr
from tests.unit.losses.lab import batch
from tests.unit.losses.plain import Sequence_, clipped, mean_of, sequences_of
from tests.unit.losses.test_losses import make

LOG_2 = math.log(2)


def one(loss: Callable[..., LossOutput], inputs: LossInputs, **options: Any) -> tuple[float, list[float], LossOutput]:
    """(loss, gradient of the log-probs, output)"""
    out = loss(inputs, **options)
    torch.autograd.backward(out.loss)
    assert inputs.logprobs.grad is not None
    return float(out.loss.detach()), inputs.logprobs.grad.tolist(), out


# ── decoupled PPO ──


@pytest.mark.parametrize(
    ("age", "weight", "ratio"),
    [(0, 4.0, 1.0), (1, 1.0, 4.0), (2, 2.0, 2.0)],
)
def test_interpolated_proximal_by_age(age: int, weight: float, ratio: float) -> None:
    """p / behaviour = 4. Proximal at age 1 is the policy that sampled, at 2 half way in log-probs, at 0 the current."""
    inputs = make([math.log(4)], advantages=[-1.0], ages=torch.tensor([age]))
    loss, gradient, _ = one(decoupled_ppo, inputs)
    assert math.exp(float(interpolated(inputs)[0])) == pytest.approx(4 / ratio)
    assert loss == pytest.approx(weight * ratio)
    assert gradient == pytest.approx([weight * ratio])  # A < 0 and r > 1: nothing is clipped, the weight is constant


def test_f50_age_zero_is_the_current_policy_and_no_division_by_zero() -> None:
    inputs = make([0.5, 0.2], behaviour=[0.1, math.nan], mask=[True, False], ages=torch.tensor([0, 0]))
    assert interpolated(inputs).tolist() == inputs.logprobs.tolist()
    loss, gradient, _ = one(decoupled_ppo, inputs)
    assert (loss, gradient[1]) == (pytest.approx(-math.exp(0.4)), 0.0)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "expected", "flat"),
    [(2 * math.log(1.5), 1.0, -1.5 * 1.2, True), (2 * math.log(0.5), -1.0, 0.5 * 0.8, True), (0.2, 1.0, None, False)],
)
def test_decoupled_clips_around_the_proximal_policy(
    log_ratio: float, advantage: float, expected: float | None, flat: bool
) -> None:
    """Age 2: weight and ratio are both the root of p / behaviour."""
    inputs = make([log_ratio], advantages=[advantage], ages=torch.tensor([2]))
    loss, gradient, out = one(decoupled_ppo, inputs)
    assert loss == pytest.approx(-math.exp(0.2) if expected is None else expected)
    assert (gradient[0] == 0.0) is flat
    assert out.metrics["loss/clip_fraction"] == (float(flat), 1.0)


def test_a_weight_above_the_cap_is_rejected_and_stays_in_the_denominator() -> None:
    inputs = make([math.log(4), math.log(9)], ages=torch.tensor([0, 0]))
    loss, gradient, out = one(decoupled_ppo, inputs, weight_cap=5.0)
    assert (loss, gradient) == (pytest.approx(-4 / 2), pytest.approx([-2.0, 0.0]))
    assert out.metrics["loss/weight_rejected"] == (1.0, 2.0)
    assert out.metrics["loss/behaviour_weight"] == (pytest.approx(4.0), 2.0)


def test_recompute_takes_the_given_proximal_policy_or_the_current_one() -> None:
    given = make([math.log(4)], ages=torch.tensor([7]), proximal_logprobs=torch.tensor([LOG_2], dtype=torch.float64))
    assert one(decoupled_ppo, given, recompute=True)[0] == pytest.approx(-2 * 1.2)
    nearer = torch.tensor([math.log(4 / 1.1)], dtype=torch.float64)
    loss, _, out = one(
        decoupled_ppo, make([math.log(4)], ages=torch.tensor([7]), proximal_logprobs=nearer), recompute=True
    )
    assert loss == pytest.approx(-4.0)
    assert out.metrics["loss/clip_fraction"] == (0.0, 1.0), "a weight of 3.6 is no ratio: the clip looks at 1.1"
    current = make([math.log(4)], ages=torch.tensor([7]))
    loss, gradient, _ = one(decoupled_ppo, current, recompute=True)
    assert (loss, gradient) == (pytest.approx(-4.0), pytest.approx([-4.0]))


def test_interpolation_without_ages_is_refused() -> None:
    with pytest.raises(InvalidRecord, match="ages"):
        decoupled_ppo(make([0.0]))


# ── TOPR ──


def test_topr_weighs_bad_sequences_by_the_ratio_of_the_whole_and_good_ones_by_one() -> None:
    """Ratios of the sequences: 1/2 * 1/2 (bad), 2 * 2 (bad, capped at 1), 1/2 (good)."""
    logprobs = [-LOG_2, -LOG_2, LOG_2, LOG_2, -LOG_2]
    inputs = make(logprobs, advantages=[-1, -1, -1, -1, 1], sequences=[0, 0, 1, 1, 2])
    loss, gradient, out = one(topr, inputs)
    assert gradient == pytest.approx([0.25 / 3, 0.25 / 3, 1 / 3, 1 / 3, -1 / 3])
    assert loss == pytest.approx((-2 * 0.25 * LOG_2 + 2 * LOG_2 + LOG_2) / 3)
    assert out.metrics["loss/negative_weight"] == (pytest.approx(2.5), 4.0)


def test_topr_leaves_a_bad_sequence_alone_once_it_is_unlearnt() -> None:
    inputs = make([-80.0], advantages=[-1.0], dtype=torch.float32)
    assert abs(one(topr, inputs)[1][0]) < 1e-8
    assert one(topr, make([-80.0], advantages=[1.0], dtype=torch.float32))[1] == [-1.0]


# ── SAPO ──


def test_sapo_closed_form() -> None:
    """At r = 1 the gate is 1/2 and the gradient that of -A r; at r = 2 it has faded to 4 p (1 - p) r."""
    assert one(sapo, make([0.0]))[:2] == (pytest.approx(-2.0), pytest.approx([-1.0]))
    p = 1 / (1 + math.exp(-1.0))
    assert one(sapo, make([LOG_2]))[:2] == (pytest.approx(-4 * p), pytest.approx([-4 * p * (1 - p) * 2]))
    q = 1 / (1 + math.exp(-1.05))
    found = one(sapo, make([LOG_2], advantages=[-1.0]))
    assert found[:2] == (pytest.approx(4 * q / 1.05), pytest.approx([4 * q * (1 - q) * 2]))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_sapo_is_smooth_where_ppo_breaks_off(advantage: float) -> None:
    gradients = [one(sapo, make([math.log(r)], advantages=[advantage]))[1][0] / r for r in (1.0, 1.2, 2.0, 5.0, 1e6)]
    sizes = [abs(each) for each in gradients]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == pytest.approx(1.0) and sizes[-1] == 0.0
    assert sizes[1] > 0.98


# ── Kimi ──


def test_kimi_closed_form() -> None:
    """D = .1 + .3: -A D + tau / 2 D²; gradient -A + tau D at every token of the sequence."""
    inputs = make([0.1, 0.3, 0.5], advantages=[2, 2, -1], sequences=[0, 0, 1])
    loss, gradient, _ = one(kimi, inputs, tau=0.5)
    assert loss == pytest.approx(((-0.8 + 0.25 * 0.16) + (0.5 + 0.25 * 0.25)) / 2)
    assert gradient == pytest.approx([(-2 + 0.5 * 0.4) / 2] * 2 + [(1 + 0.5 * 0.5) / 2])


def test_kimi_is_the_squared_regression_of_the_paper() -> None:
    """(r - mean - tau D)² / (2 tau) has the same gradient, and the rest of it is a constant."""
    tau, rewards = 0.3, torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    ids = torch.tensor([0, 0, 1, 2, 2])
    advantages = (rewards - rewards.mean())[ids]
    inputs = make([0.1, -0.4, 0.2, 0.3, 0.5], advantages=advantages, sequences=ids)
    loss, gradient, _ = one(kimi, inputs, tau=tau)
    leaf = inputs.logprobs.detach().clone().requires_grad_()
    distance = torch.zeros(3, dtype=torch.float64).index_add(0, ids, leaf)
    paper = ((rewards - rewards.mean() - tau * distance) ** 2 / (2 * tau)).mean()
    torch.autograd.backward(paper)
    assert leaf.grad is not None and gradient == pytest.approx(leaf.grad.tolist())
    assert loss == pytest.approx(float(paper.detach() - ((rewards - rewards.mean()) ** 2 / (2 * tau)).mean()))


def test_kimi_with_equal_rewards_only_pulls_back_to_what_sampled() -> None:
    assert one(kimi, make([0.0, 0.0], advantages=[0, 0]))[1] == [0.0, 0.0]
    away = one(kimi, make([0.2, 0.2], advantages=[0, 0]), tau=0.5)[1]
    assert away == pytest.approx([0.2, 0.2])


# ── plain formulas ──


def plain_decoupled(inputs: LossInputs, **o: Any) -> Tensor:
    assert inputs.ages is not None
    ages = [inputs.ages[(inputs.sequence_ids == each) & inputs.mask] for each in torch.unique(inputs.sequence_ids)]
    terms = []
    for s, age in zip(sequences_of(inputs), ages, strict=True):
        share = torch.tensor([1 / float(d) if d else 0.0 for d in age], dtype=torch.float64)
        near = s.near if o.get("recompute") else (share * s.then + (1 - share) * s.now).detach()
        weight = torch.exp(near - s.then)
        weight = torch.stack([w if w <= o.get("weight_cap", 5.0) else w * 0 for w in weight])
        low, high = 1 - o.get("clip_low", 0.2), 1 + o.get("clip_high", o.get("clip_low", 0.2))
        terms.append(weight * clipped(torch.exp(s.now - near), s.advantage, low, high))
    return mean_of(terms, o.get("aggregation", "token_mean"), o.get("constant"))


def by_sequence(inputs: LossInputs, term: Callable[[Sequence_], Tensor], o: dict[str, Any], how: str) -> Tensor:
    terms = [term(s) for s in sequences_of(inputs)]
    return mean_of(terms, o.get("aggregation", how), o.get("constant", 1.0))


def plain_topr(inputs: LossInputs, **o: Any) -> Tensor:
    def term(s: Sequence_) -> Tensor:
        whole = torch.exp((s.now - s.then).sum()).detach()
        weights = [torch.clip(whole, max=o.get("negative_cap", 1.0)) if a < 0 else whole * 0 + 1 for a in s.advantage]
        return -torch.stack(weights) * s.advantage * s.now

    return by_sequence(inputs, term, o, "sequence_sum_over_constant")


def plain_sapo(inputs: LossInputs, **o: Any) -> Tensor:
    def term(s: Sequence_) -> Tensor:
        found = []
        for now, then, a in zip(s.now, s.then, s.advantage, strict=True):
            t = o.get("temperature_positive", 1.0) if a > 0 else o.get("temperature_negative", 1.05)
            found.append(-a * 4 / t / (1 + torch.exp(-t * (torch.exp(now - then) - 1))))
        return torch.stack(found)

    return by_sequence(inputs, term, o, "sequence_mean")


def plain_kimi(inputs: LossInputs, **o: Any) -> Tensor:
    tau = o.get("tau", 0.1)

    def term(s: Sequence_) -> Tensor:
        distance = s.now - s.then
        return -s.advantage * distance + tau / 2 * distance.sum() ** 2 / len(distance)

    return by_sequence(inputs, term, o, "sequence_sum_over_constant")


FORMULAS: dict[str, tuple[Callable[..., Tensor], tuple[dict[str, Any], ...]]] = {
    "decoupled_ppo": (plain_decoupled, ({}, {"recompute": True}, {"weight_cap": 1.1, "clip_low": 0.05})),
    "topr": (plain_topr, ({}, {"negative_cap": 0.5})),
    "sapo": (plain_sapo, ({}, {"temperature_positive": 3.0, "temperature_negative": 5.0})),
    "kimi": (plain_kimi, ({}, {"tau": 0.0}, {"tau": 2.0})),
}
WAYS: tuple[dict[str, Any], ...] = ({}, {"aggregation": "token_mean"}, {"aggregation": "sequence_mean"})


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("way", WAYS, ids=["own", "token", "sequence"])
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_are_those_of_the_plain_formula(name: str, way: dict[str, Any], seed: int) -> None:
    formula, sets = FORMULAS[name]
    for options in sets:
        inputs = batch(seed)
        leaf = inputs.logprobs.clone().requires_grad_()
        copy = make_leaf(inputs, leaf)
        expected = formula(copy, **options, **way)
        torch.autograd.backward(expected)
        mine = make_leaf(inputs, inputs.logprobs.clone().requires_grad_())
        loss, gradient, _ = one(LOSSES[name].loss, mine, **options, **way)
        assert loss == pytest.approx(float(expected.detach()), abs=1e-12)
        assert leaf.grad is not None and gradient == pytest.approx(leaf.grad.tolist(), abs=1e-12)


def make_leaf(inputs: LossInputs, leaf: Tensor) -> LossInputs:
    return replace(inputs, logprobs=leaf)


@pytest.mark.parametrize(
    ("name", "option", "value", "words"),
    [
        ("decoupled_ppo", "weight_cap", 1.0, "weight_cap must be finite and > 1, found 1.0"),
        ("topr", "negative_cap", -0.1, "negative_cap must be finite and >= 0"),
        ("sapo", "temperature_negative", 0.0, "temperature_negative must be finite and > 0"),
        ("kimi", "tau", -1.0, "tau must be finite and >= 0"),
    ],
)
def test_options_out_of_range_name_option_range_and_value(name: str, option: str, value: float, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LOSSES[name].loss(batch(), **{option: value})
