"""PPO, DAPO, Dr. GRPO, GSPO, CISPO by hand: the faults of the field as numbers on few tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from astraflow.errors import ConfigError, InvalidRecord
from astraflow.losses import cispo, dapo, dr_grpo, grpo, gspo, ppo
from tests.unit.losses.test_losses import make


def of(loss: Any, ratios: list[float], advantages: list[float], **more: Any) -> tuple[float, list[float], Any]:
    """(loss, gradient, output). ``options``: of the loss; the rest is columns."""
    options = more.pop("options", {})
    inputs = make([math.log(ratio) for ratio in ratios], advantages=advantages, **more)
    out = loss(inputs, **options)
    torch.autograd.backward(out.loss)
    assert inputs.logprobs.grad is not None
    return float(out.loss.detach()), inputs.logprobs.grad.tolist(), out


# ── clips ──


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(1.5, 1, -1.2), (0.5, 1, -0.5), (1.5, -1, 1.5), (0.5, -1, 0.8), (1.0, 1, -1.0), (1.2, 1, -1.2), (0.8, -1, 0.8)],
)
def test_f42_ppo_clips_after_it_multiplies(ratio: float, advantage: float, expected: float) -> None:
    assert of(ppo, [ratio], [advantage])[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "flat"),
    [
        (1.5, -1, 1.5, False),
        (3.0, -1, 3.0, False),
        (3.5, -1, 3.0, True),
        (900.0, -2, 6.0, True),
        (0.5, -1, 0.8, True),
        (900.0, 1, -1.2, True),
        (0.1, 1, -0.1, False),
    ],
)
def test_dual_clip_bounds_what_a_bad_token_can_do(ratio: float, advantage: float, expected: float, flat: bool) -> None:
    loss, gradient, out = of(ppo, [ratio], [advantage], options={"dual_clip": 3.0})
    assert loss == pytest.approx(expected)
    if ratio != 3.0:  # at the very edge either side's gradient is right
        assert (gradient == [0.0]) == flat
        assert out.metrics["loss/clip_fraction"] == (float(flat), 1.0)


def test_a_dual_clip_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="dual_clip must be finite and > 1 or None, found 1"):
        ppo(make([0.0]), dual_clip=1)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"), [(1.25, 1, -1.25), (1.3, 1, -1.28), (0.79, -1, 0.8), (0.72, -1, 0.8)]
)
def test_f43_dapo_clips_higher_on_the_upper_side_only(ratio: float, advantage: float, expected: float) -> None:
    assert of(dapo, [ratio], [advantage])[0] == pytest.approx(expected)


def test_f43_dapo_s_upper_bound_does_not_follow_the_lower_one() -> None:
    assert of(dapo, [1.5], [1], options={"clip_low": 0.1})[0] == pytest.approx(-1.28)
    assert of(grpo, [1.5], [1], options={"clip_low": 0.1})[0] == pytest.approx(-1.1)


# ── the critic's part ──


@pytest.mark.parametrize(
    ("value", "old", "goal", "clip", "expected", "gradient"),
    [
        (2.0, 1.0, 3.0, None, 0.5, -1.0),
        (2.0, 1.0, 3.0, 0.5, 1.125, 0.0),
        (1.25, 1.0, 3.0, 0.5, 1.53125, -1.75),
        (2.0, 1.0, 0.0, 0.5, 2.0, 2.0),
        (0.0, 1.0, 3.0, 0.5, 4.5, -3.0),
    ],
)
def test_value_clip_takes_the_worse_error(
    value: float, old: float, goal: float, clip: float | None, expected: float, gradient: float
) -> None:
    """Moved far enough towards the goal: flat. Away from it, or beyond it: followed."""
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    columns = {"old_values": torch.tensor([old]), "returns": torch.tensor([goal])}
    inputs = make([0.0], advantages=[0.0], values=values, **columns)
    out = ppo(inputs, value_coefficient=1.0, value_clip=clip)
    torch.autograd.backward(out.loss)
    assert values.grad is not None
    assert (float(out.loss.detach()), float(values.grad[0])) == pytest.approx((expected, gradient))
    assert out.metrics["loss/value"] == pytest.approx((expected, 1.0))


def test_a_critic_without_columns_is_named() -> None:
    with pytest.raises(InvalidRecord, match="needs values, old_values and returns"):
        ppo(make([0.0]), value_coefficient=0.5)


# ── aggregation ──


def test_f45_dr_grpo_divides_every_sequence_by_one_constant() -> None:
    """Lengths 1 and 3, A = +1 and -1: (-1 + 3) / 4 / 2 sequences."""
    found = of(dr_grpo, [1.0] * 4, [1, -1, -1, -1], sequences=[0, 1, 1, 1], options={"constant": 4.0})
    assert found[0] == pytest.approx(0.25)
    assert found[1] == pytest.approx([-0.125, 0.125, 0.125, 0.125]), "a long answer's tokens weigh as much"
    with pytest.raises(ConfigError, match="needs constant > 0"):
        dr_grpo(make([0.0]))


def test_a_long_wrong_answer_is_let_off_by_the_mean_of_each_sequence() -> None:
    found = of(grpo, [1.0] * 4, [1, -1, -1, -1], sequences=[0, 1, 1, 1], options={"aggregation": "sequence_mean"})
    assert found[0] == pytest.approx(0.0) and found[1] == pytest.approx([-0.5, 1 / 6, 1 / 6, 1 / 6])


# ── one ratio a sequence ──


def test_f46_gspo_is_the_geometric_mean_over_unmasked_tokens() -> None:
    """Log-ratios [.3, -.1, .2 | 9] and [.5, .5 | 0, 0]: 1.14263 and 1.64872, whatever is masked behind."""
    inputs = make(
        [0.3, -0.1, 0.2, 9.0, 0.5, 0.5, 0.0, 0.0],
        advantages=[-1.0] * 8,
        mask=[True, True, True, False, True, True, False, False],
        sequences=[0] * 4 + [1] * 4,
    )
    out = gspo(inputs, clip_low=0.99, clip_high=9.0)
    assert float(out.loss.detach()) == pytest.approx((1.14263 + 1.64872) / 2, abs=1e-5)


@pytest.mark.parametrize("variant", ["sequence", "token"])
def test_f46_two_hundred_tokens_do_not_overflow(variant: str) -> None:
    inputs = make([0.5] * 200, advantages=[-1.0] * 200)
    out = gspo(inputs, variant=variant, clip_high=9.0)
    assert float(out.loss.detach()) == pytest.approx(1.64872, abs=1e-5)
    torch.autograd.backward(out.loss)
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.tolist() == pytest.approx([1.64872 / 200] * 200, abs=1e-7)


def test_gspo_clips_the_whole_sequence_at_once() -> None:
    found = of(gspo, [1.5, 1.0, 0.8], [1.0] * 3, options={"clip_low": 0.05, "clip_high": 0.05})
    mean = (1.5 * 1.0 * 0.8) ** (1 / 3)
    assert mean > 1.05 and found[0] == pytest.approx(-1.05) and found[1] == [0.0] * 3
    assert found[2].metrics["loss/clip_fraction"] == (3.0, 3.0)


def test_gspo_variants_differ_where_a_sequence_has_several_advantages() -> None:
    """Ratio 1, A = 1 and 0: by sequence both tokens share the gradient, by token the first has it all."""
    whole = of(gspo, [1.0, 1.0], [1.0, 0.0], options={"variant": "sequence"})
    token = of(gspo, [1.0, 1.0], [1.0, 0.0], options={"variant": "token"})
    assert whole[0] == token[0] == pytest.approx(-0.5)
    assert whole[1] == pytest.approx([-0.25, -0.25]) and token[1] == pytest.approx([-0.5, 0.0])


# ── CISPO ──


def test_f48_cispo_keeps_the_gradient_of_a_clipped_token() -> None:
    """r = 1.5, cap 1.28, A = 1, log p = -.4: loss .512, gradient -1.28 where PPO's is 0."""
    inputs = make([-0.4], behaviour=[-0.4 - math.log(1.5)])
    out = cispo(inputs, clip_high=0.28)
    torch.autograd.backward(out.loss)
    assert inputs.logprobs.grad is not None
    assert float(out.loss.detach()) == pytest.approx(0.512)
    assert inputs.logprobs.grad.tolist() == pytest.approx([-1.28])
    assert out.metrics["loss/clip_fraction"] == (1.0, 1.0)


def test_f48_cispo_has_no_lower_bound_unless_asked() -> None:
    assert of(cispo, [0.5], [1.0])[1] == pytest.approx([-0.5])
    assert of(cispo, [0.5], [1.0], options={"clip_low": 0.2})[1] == pytest.approx([-0.8])
