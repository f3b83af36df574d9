"""RLOO, REINFORCE++ and the corrections of an engine's log-probs, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from astraflow.losses import mis, reinforce_plus_plus, rloo, tis
from astraflow.losses.reinforce_plus_plus import prepare
from tests.unit.losses.test_losses import make


def gradient_of(inputs: Any, out: Any) -> list[float]:
    torch.autograd.backward(out.loss)
    assert inputs.logprobs.grad is not None
    found: list[float] = inputs.logprobs.grad.tolist()
    return found


# ── RLOO ──


def test_rloo_is_reinforce_over_whole_answers() -> None:
    """Two answers, A = ±1: every token has its answer's advantage over the number of answers, whatever its length."""
    inputs = make([-1.0, -2.0, -3.0], advantages=[1, -1, -1], sequences=[0, 1, 1])
    out = rloo(inputs)
    assert float(out.loss.detach()) == pytest.approx((1.0 - 5.0) / 2)
    assert gradient_of(inputs, out) == [-0.5, 0.5, 0.5]


def test_rloo_by_ratio_clips_the_product() -> None:
    """Ratios 1.2 and 1.5: 1.8 of the answer is clipped to 1.2, no token of it has a gradient; 1.1 is followed."""
    inputs = make([math.log(each) for each in (1.2, 1.5, 1.1)], sequences=[0, 0, 1])
    out = rloo(inputs, ratio="sequence")
    assert float(out.loss.detach()) == pytest.approx(-(1.2 + 1.1) / 2)
    assert out.metrics["loss/clip_fraction"] == (2.0, 3.0)
    assert gradient_of(inputs, out) == pytest.approx([0.0, 0.0, -0.55])


def test_rloo_by_ratio_gives_every_token_the_ratio_of_the_answer() -> None:
    inputs = make([math.log(each) for each in (1.5, 0.5)], advantages=[-2.0, -2.0])
    out = rloo(inputs, ratio="sequence", clip_low=0.5)
    assert float(out.loss.detach()) == pytest.approx(1.5)
    assert gradient_of(inputs, out) == pytest.approx([1.5, 1.5])


# ── REINFORCE++ ──


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_normalised_advantages_have_the_precision_of_the_log_probs(dtype: torch.dtype) -> None:
    """Whatever holds the advantages: 0.8660 is 0.8672 in bfloat16."""
    inputs = make([0.0] * 4, advantages=[1, 0, 0, 1], sequences=[0, 1, 1, 2])
    found = prepare(replace(inputs, advantages=inputs.advantages.to(dtype))).advantages
    assert found.dtype == inputs.logprobs.dtype
    assert found.tolist() == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024], abs=2e-6)


def test_f37_f38_advantages_are_normalised_once_over_the_batch_s_tokens() -> None:
    """[1, 0, 0, 1] by token: mean 1/2, unbiased deviation .57735."""
    inputs = make([0.0] * 4, advantages=[1, 0, 0, 1], sequences=[0, 1, 1, 2])
    found = prepare(inputs).advantages.tolist()
    assert found == pytest.approx([0.866, -0.866, -0.866, 0.866], abs=1e-3)
    again = prepare(make([0.0] * 4, advantages=found, sequences=[0, 1, 1, 2])).advantages.tolist()
    assert again == pytest.approx([1 * each for each in found], abs=1e-5), "of what is normalised, nothing changes"


@pytest.mark.parametrize("rewards", [[0.1] * 16, [0.9] * 3, [0.35] * 8, [1.0], [0.0] * 4, []])
def test_f34_f35_equal_rewards_are_exactly_zero(rewards: list[float]) -> None:
    inputs = make([0.0] * len(rewards), advantages=rewards, dtype=torch.float32)
    out = reinforce_plus_plus(inputs)
    assert gradient_of(inputs, out) == [0.0] * len(rewards)
    assert float(out.loss.detach()) == 0.0


def test_f34_a_small_difference_is_a_signal() -> None:
    assert any(prepare(make([0.0] * 4, advantages=[0, 0, 0, 1e-3])).advantages.tolist())


def test_f40_huge_rewards_in_float32() -> None:
    inputs = make([0.0] * 8, advantages=[1e6] * 7 + [1e6 + 1], dtype=torch.float32)
    found = prepare(inputs).advantages.tolist()
    assert found == pytest.approx([-0.3536] * 7 + [2.4749], abs=1e-3)
    absurd = prepare(make([0.0] * 4, advantages=[1e30, 0, 0, -1e30], dtype=torch.float32)).advantages.tolist()
    assert absurd == pytest.approx([1.2247, 0, 0, -1.2247], abs=1e-3)


def test_reinforce_plus_plus_takes_the_kl_off_before_it_normalises() -> None:
    """Reward 1 for both tokens; the second is .5 above the reference: 1 - .5 = .5 for both, then 1 - .5 and 1."""
    columns = {"behaviour": [-1.0, -1.0], "sequences": [0, 0]}
    first = make([-1.0, -1.0], **columns, reference_logprobs=torch.tensor([-1.0, -1.5], dtype=torch.float64))
    assert prepare(first, kl_coefficient=1.0).advantages.tolist() == [0.0, 0.0], "to the end: both pay for the second"
    second = replace(first, reference_logprobs=torch.tensor([-1.5, -1.0], dtype=torch.float64))
    found = prepare(second, kl_coefficient=1.0).advantages.tolist()
    assert found == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-5), ".5 and 1"
    out = reinforce_plus_plus(second, kl_coefficient=1.0)
    assert out.metrics["loss/reference_kl"] == pytest.approx((0.5, 2.0)), "what is in the reward is shown too"
    assert "loss/reference_kl" not in reinforce_plus_plus(second).metrics


# ── between engine and trainer ──


def test_f47_rejected_tokens_stay_in_the_denominator() -> None:
    """Ratios [1.11, .22, 2.23, .00005, 1.35], range [.5, 2]: (1.11 + 1.35) / 5 = .492; over what is left: 1.23."""
    ratios = [1.11, 0.22, 2.23, 0.00005, 1.35]
    inputs = make([0.0] * 5, behaviour=[-math.log(each) for each in ratios], advantages=[-1.0] * 5)
    out = mis(inputs, low=0.5, high=2.0)
    assert float(out.loss.detach()) == pytest.approx(0.492)
    assert out.metrics["loss/weight_rejected"] == (3.0, 5.0)
    assert gradient_of(inputs, out) == pytest.approx([1.11 / 5, 0, 0, 0, 1.35 / 5])


def test_f47_everything_rejected_is_zero() -> None:
    inputs = make([0.0] * 3, behaviour=[-3.0] * 3)
    out = mis(inputs)
    assert float(out.loss.detach()) == 0.0 and gradient_of(inputs, out) == [0.0] * 3


def test_tis_truncates_the_weight_and_leaves_the_gradient() -> None:
    """w = 3 and .5, cap 2: gradients -2 and -.5; the weight itself has none."""
    inputs = make([0.0, 0.0], behaviour=[-math.log(3), math.log(2)])
    out = tis(inputs)
    assert float(out.loss.detach()) == pytest.approx(-1.25)
    assert out.metrics["loss/weight_truncated"] == (1.0, 2.0)
    assert gradient_of(inputs, out) == pytest.approx([-1.0, -0.25])


@pytest.mark.parametrize(
    ("level", "weights"), [("token", [2.0, 0.25]), ("sequence", [0.5, 0.5]), ("geometric", [0.70711, 0.70711])]
)
def test_levels_of_the_weight(level: str, weights: list[float]) -> None:
    gaps = [math.log(2), math.log(0.25)]
    inputs = make([0.0, 0.0], behaviour=[-each for each in gaps])
    assert gradient_of(inputs, tis(inputs, level=level, cap=9.0)) == pytest.approx([-w / 2 for w in weights], abs=1e-5)


def test_proximal_log_probs_are_what_the_weight_is_of_and_the_ratio_to() -> None:
    """p / behaviour = 1.5 · 2: the weight 2 is the engine's, the ratio 1.5 the policy's, clipped at 1.2."""
    near = torch.tensor([math.log(2)], dtype=torch.float64)
    inputs = make([math.log(3)], proximal_logprobs=near)
    out = tis(inputs, cap=9.0)
    assert float(out.loss.detach()) == pytest.approx(-2 * 1.2)
    assert gradient_of(inputs, out) == [0.0]


def test_without_a_mismatch_the_corrections_are_the_policy_gradient() -> None:
    for loss in (tis, mis):
        inputs = make([-1.0, -2.0], behaviour=[-1.0, -2.0], advantages=[1.0, -1.0])
        assert gradient_of(inputs, loss(inputs)) == [-0.5, 0.5]
