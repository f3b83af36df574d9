"""The head's own forward and backward against autograd through ordinary operations."""

from __future__ import annotations

import pytest
import torch

from astraflow.backends import head as head_module
from astraflow.backends.head import Heads, entropy_of, head_backward, head_forward

M, H, V = 7, 5, 11


def make() -> tuple[torch.Tensor, torch.Tensor, Heads, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(M, H, generator=generator)
    weight = torch.randn(V, H, generator=generator)
    heads = Heads(
        inverse_temperature=torch.rand(M, generator=generator) + 0.5,
        target_head=torch.tensor([0, 0, 0, 1, 2, 3, 6, 6]),  # heads 4 and 5 predict nothing
        targets=torch.tensor([3, 3, 4, 0, 10, 5, 1, 2]),  # the same target twice at head 0
    )
    return hidden, weight, heads, torch.randn(8, generator=generator)


def reference(hidden: torch.Tensor, weight: torch.Tensor, heads: Heads) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (hidden @ weight.T) * heads.inverse_temperature[:, None]
    return torch.log_softmax(logits, -1)[heads.target_head, heads.targets], entropy_of(logits)


@pytest.mark.parametrize("chunk", [1, 3 * V, 1 << 20])
def test_forward_and_backward_equal_autograd(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", chunk)
    hidden, weight, heads, gradient = make()
    forward = head_forward(hidden, weight, heads)
    a, b = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprobs, entropy = reference(a, b, heads)
    torch.testing.assert_close(forward.logprobs, logprobs)
    torch.testing.assert_close(forward.entropy, entropy)
    logprobs.backward(gradient)
    d_hidden, d_weight = head_backward(forward, gradient, hidden, weight, heads)
    torch.testing.assert_close(d_hidden, a.grad)
    torch.testing.assert_close(d_weight, b.grad)


def test_a_confident_token_keeps_its_small_gradient_in_bf16() -> None:
    """p = 0.9999 is 1 in bf16; the gradient of its own logit must still be 1 - p."""
    weight = torch.tensor([[9.2103], [0.0]], dtype=torch.bfloat16)
    hidden = torch.ones(1, 1, dtype=torch.bfloat16)
    one = torch.zeros(1, dtype=torch.int64)
    heads = Heads(inverse_temperature=torch.ones(1), target_head=one, targets=one)
    forward = head_forward(hidden, weight, heads)
    exact = 1 - float(forward.logprobs.exp())
    assert float(forward.probabilities[0, 0]) == 1.0
    _, d_weight = head_backward(forward, torch.ones(1), hidden, weight, heads)
    assert float(d_weight[0, 0]) == pytest.approx(exact, rel=0.01)


def test_f51_entropy_with_a_forbidden_token() -> None:
    assert float(entropy_of(torch.tensor([0.0, 0.0, -torch.inf]))) == pytest.approx(0.6931, abs=1e-4)
    weight = torch.tensor([[0.0], [0.0], [-torch.inf]])
    heads = Heads(
        inverse_temperature=torch.ones(1), target_head=torch.zeros(1, dtype=torch.int64), targets=torch.tensor([1])
    )
    forward = head_forward(torch.ones(1, 1), weight, heads)
    assert float(forward.entropy) == pytest.approx(0.6931, abs=1e-4)
    assert float(forward.logprobs) == pytest.approx(-0.6931, abs=1e-4)


def test_f51_entropy_of_the_batch_is_a_mean_over_tokens() -> None:
    from astraflow.observe.metrics import merge_means

    assert merge_means([{"e": (1.0, 1)}, {"e": (200.0, 100)}])["e"] == pytest.approx(1.9901, abs=1e-4)
