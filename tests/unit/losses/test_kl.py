"""KL estimators by number, by place, and by the gradient that each really descends."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from astraflow.errors import ConfigError
from astraflow.loss_options import KL, check_options
from astraflow.losses import LossInputs, estimate_kl, grpo
from astraflow.losses.kl import to_the_end


@pytest.mark.parametrize(
    ("difference", "k2", "k3"),
    [(0.1, 0.005, 0.0048374), (-0.1, 0.005, 0.0051709), (1.0, 0.5, 0.36788), (-1.0, 0.5, 0.71828), (0.0, 0.0, 0.0)],
)
def test_f44_estimators_and_their_gradients(difference: float, k2: float, k3: float) -> None:
    wanted = {"k1": (difference, 1.0), "k2": (k2, difference), "k3": (k3, 1 - math.exp(-difference))}
    for name, (value, gradient) in wanted.items():
        d = torch.tensor([difference], dtype=torch.float64, requires_grad=True)
        found = estimate_kl(d, name)
        torch.autograd.backward(found.sum())
        assert float(found.detach()) == pytest.approx(value, abs=1e-5)
        assert d.grad is not None
        assert float(d.grad) == pytest.approx(gradient)


def test_f44_unknown_names_list_the_valid_ones() -> None:
    for name in ("K3", "k4", "k3+"):
        with pytest.raises(ConfigError, match=f"'{name.replace('+', '[+]')}' is unknown; there are k1, k2, k3"):
            estimate_kl(torch.zeros(1), name)
    with pytest.raises(ConfigError, match=r"kl must be one of k1_in_loss, .*found 'k3'"):
        check_options("grpo", {"kl": "k3"})


def test_f44_k3_is_never_negative_and_never_overflows() -> None:
    d = torch.cat([torch.linspace(-100, 100, 4001), torch.linspace(-1e-3, 1e-3, 4001)]).requires_grad_()
    found = estimate_kl(d, "k3")
    torch.autograd.backward(found.sum())
    assert bool((found >= 0).all()) and bool(found.isfinite().all())
    assert d.grad is not None and bool(d.grad.isfinite().all())
    assert d.grad[0] == 0, "beyond the clamp it is flat, not of the wrong sign"
    assert float(found[4000].detach()) == pytest.approx(99.0)
    assert d.grad[4000] == 1, "far above the reference it still pulls"


def test_to_the_end_is_by_sequence_whatever_the_order() -> None:
    values = torch.tensor([1.0, 10.0, 2.0, 20.0, 4.0, 40.0])
    ids = torch.tensor([7, 3, 7, 3, 7, 3])
    assert to_the_end(values, ids).tolist() == [7.0, 70.0, 6.0, 60.0, 4.0, 40.0]
    assert to_the_end(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_kl_in_the_reward_is_what_a_token_can_still_cause() -> None:
    """d = .5, -.25 against the reference; coefficient 2: the first token pays for both, the second for itself."""
    inputs = LossInputs(
        logprobs=torch.tensor([-1.0, -2.0], requires_grad=True),
        behaviour_logprobs=torch.tensor([-1.0, -2.0]),
        advantages=torch.tensor([1.0, 1.0]),
        mask=torch.ones(2, dtype=torch.bool),
        sequence_ids=torch.zeros(2, dtype=torch.int64),
        reference_logprobs=torch.tensor([-1.5, -1.75]),
    )
    out = grpo(inputs, kl="k1_in_reward", kl_coefficient=2.0)
    torch.autograd.backward(out.loss)
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.tolist() == pytest.approx([-(1 - 2 * 0.25) / 2, -(1 + 2 * 0.25) / 2])
    assert out.metrics["loss/reference_kl"] == pytest.approx((0.25, 2.0))


# ── what is really descended: exact expectations over every sequence of two tokens from three words ──

START = torch.tensor([[0.3, -0.4, 0.1], [0.7, 0.2, -0.5], [-0.3, 0.4, 0.6], [0.1, 0.0, -0.8]], dtype=torch.float64)
"""Logits of the first word, and of the second after each first."""
OTHER = torch.tensor([[-0.2, 0.5, 0.0], [0.1, -0.6, 0.3], [0.9, 0.0, -0.4], [-0.5, 0.2, 0.3]], dtype=torch.float64)
SAMPLER = START + 0.4 * torch.tensor([[1, -1, 0], [0, 1, -1], [-1, 0, 1], [1, 0, -1]], dtype=torch.float64)


def of_words(logits: Tensor, first: int, second: int) -> Tensor:
    """[2] log-probs"""
    table = torch.log_softmax(logits, -1)
    return torch.stack([table[0, first], table[1 + first, second]])


def expected_gradient(kl: str, sampler: Tensor = START) -> Tensor:
    """Of the loss with coefficient 1 and no rewards, over all sequences by the probability of sampling them."""
    logits = START.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for first, second in product(range(3), range(3)):
        behaviour = of_words(sampler, first, second)
        inputs = LossInputs(
            logprobs=of_words(logits, first, second),
            behaviour_logprobs=behaviour,
            advantages=torch.zeros(2, dtype=torch.float64),
            mask=torch.ones(2, dtype=torch.bool),
            sequence_ids=torch.zeros(2, dtype=torch.int64),
            reference_logprobs=of_words(OTHER, first, second),
        )
        options: dict[str, Any] = {"aggregation": "sequence_sum_over_constant", "constant": 1.0}
        out = grpo(inputs, kl=kl, kl_coefficient=1.0, clip_low=0.99, clip_high=99.0, **options)
        total = total + behaviour.sum().exp() * out.loss
    torch.autograd.backward(total)
    assert logits.grad is not None
    return logits.grad


def gradient_of_kl(*, reverse: bool, by_token: bool = False) -> Tensor:
    """``reverse``: KL(p, q), else KL(q, p). ``by_token``: with the histories held where p has sampled them."""
    logits = START.clone().requires_grad_()
    p, q = torch.log_softmax(logits, -1), torch.log_softmax(OTHER, -1)
    one = (p.exp() * (p - q)).sum(-1) if reverse else (q.exp() * (q - p)).sum(-1)
    reach = (p.detach() if by_token else p)[0].exp()
    torch.autograd.backward(one[0] + (reach * one[1:]).sum())
    assert logits.grad is not None
    return logits.grad


def test_k1_in_the_reward_descends_the_kl() -> None:
    torch.testing.assert_close(expected_gradient("k1_in_reward"), gradient_of_kl(reverse=True), atol=1e-12, rtol=0)


def test_k1_in_the_loss_does_nothing_on_average() -> None:
    torch.testing.assert_close(expected_gradient("k1_in_loss"), torch.zeros_like(START), atol=1e-12, rtol=0)


def test_k2_and_weighted_k3_in_the_loss_descend_the_kl_of_each_token() -> None:
    """Reverse, each token at the histories that p samples; what a token does to later histories is not in a loss."""
    wanted = gradient_of_kl(reverse=True, by_token=True)
    torch.testing.assert_close(expected_gradient("k2_in_loss"), wanted, atol=1e-12, rtol=0)
    torch.testing.assert_close(expected_gradient("k3_weighted"), wanted, atol=1e-12, rtol=0)


def test_k3_in_the_loss_descends_the_other_kl() -> None:
    wanted = gradient_of_kl(reverse=False, by_token=True)
    torch.testing.assert_close(expected_gradient("k3_in_loss"), wanted, atol=1e-12, rtol=0)
    assert float((wanted - gradient_of_kl(reverse=True, by_token=True)).abs().max()) > 0.05


def test_k2_and_k3_in_the_reward_descend_neither() -> None:
    for kl in ("k2_in_reward", "k3_in_reward"):
        found = expected_gradient(kl)
        for reverse, by_token in product((True, False), repeat=2):
            wanted = gradient_of_kl(reverse=reverse, by_token=by_token)
            assert float((found - wanted).abs().max()) > 0.02, kl


def test_off_policy_only_weighted_k3_still_descends_the_first_tokens_kl() -> None:
    """Of the first word, whose history is the prompt; sampled by another policy than the one that learns."""
    wanted = gradient_of_kl(reverse=True, by_token=True)[0]
    torch.testing.assert_close(expected_gradient("k3_weighted", SAMPLER)[0], wanted, atol=1e-12, rtol=0)
    for kl in set(KL) - {"k3_weighted"}:
        assert float((expected_gradient(kl, SAMPLER)[0] - wanted).abs().max()) > 1e-3, kl
