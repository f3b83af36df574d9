"""Sampling against plain numpy: distribution, truncation, greedy, log-probs before truncation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from astraflow.engines.draws import uniform
from astraflow.engines.sampling import Draw, sample


def draw(u: float, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Draw:
    return Draw(temperature=temperature, top_p=top_p, top_k=top_k, uniform=u)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


@pytest.mark.parametrize("vocabulary", [5, 256, 700, 1024])
def test_token_is_where_the_running_sum_passes_the_draw(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = rng.normal(0, 2, (9, vocabulary)).astype(np.float32)
    us = rng.random(9)
    tokens, logprobs = sample(torch.from_numpy(logits), [draw(u) for u in us])
    for row, u in enumerate(us):
        probabilities = softmax(logits[row])
        running = probabilities.cumsum()
        assert running[tokens[row]] >= u - 1e-6
        assert tokens[row] == 0 or running[tokens[row] - 1] <= u + 1e-6
        assert logprobs[row] == pytest.approx(np.log(probabilities[tokens[row]]), abs=1e-5)


def test_frequencies_follow_the_temperature() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).repeat(4000, 1)
    for temperature in (0.5, 1.0, 2.0):
        tokens, _ = sample(logits, [draw(uniform(seed, 0), temperature=temperature) for seed in range(4000)])
        found = np.bincount(tokens, minlength=4) / 4000
        assert np.abs(found - softmax(logits[0].numpy() / temperature)).max() < 0.03


def test_greedy_takes_the_largest_and_tells_its_logprob_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    tokens, logprobs = sample(logits, [draw(0.999, temperature=0.0), draw(0.0, temperature=0.0, top_k=2)])
    assert tokens == [1, 0]
    assert logprobs[0] == pytest.approx(np.log(softmax(logits[0].numpy())[1]), abs=1e-6)


def test_top_k_and_top_p_choose_whom_but_leave_the_logprob_alone() -> None:
    logits = np.array([1.0, 4.0, 3.0, 0.0, 2.0], np.float32)
    rows = torch.from_numpy(logits)[None].repeat(200, 1)
    us = [uniform(seed, 1) for seed in range(200)]
    full = softmax(logits)
    for options, allowed in (
        ({"top_k": 2}, {1, 2}),
        ({"top_p": 0.6}, {1}),
        ({"top_p": 0.8}, {1, 2}),
        ({"top_k": 1}, {1}),
    ):
        tokens, logprobs = sample(rows, [draw(u, **options) for u in us])
        assert set(tokens) == allowed
        for token, logprob in zip(tokens, logprobs, strict=True):
            assert logprob == pytest.approx(np.log(full[token]), abs=1e-5)


def test_top_k_of_tied_logits_keeps_exactly_k() -> None:
    tokens, _ = sample(torch.zeros(300, 8), [draw(uniform(seed, 0), top_k=3) for seed in range(300)])
    assert set(tokens) == {0, 1, 2}


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((4, 600), -torch.inf)
    logits[:, 300] = 0.0
    logits[:, 599] = 0.0
    tokens, logprobs = sample(logits, [draw(u) for u in (0.0, 0.4999, 0.5, 1 - 2**-53)])
    assert tokens == [300, 300, 599, 599]
    assert logprobs == pytest.approx([np.log(0.5)] * 4)


def test_mixed_rows_do_not_disturb_each_other() -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 3, (11, 300)).astype(np.float32))
    draws = [draw(uniform(i, 0), temperature=(0.0, 0.7, 1.0)[i % 3], top_k=(0, 5)[i % 2]) for i in range(11)]
    together = sample(logits, draws)
    for row in range(11):
        alone = sample(logits[row : row + 1], draws[row : row + 1])
        assert (together.tokens[row], together.logprobs[row]) == (alone.tokens[0], alone.logprobs[0])


def test_logits_that_are_not_finite_give_a_logprob_that_is_not() -> None:
    _, logprobs = sample(torch.full((1, 300), torch.nan), [draw(0.5)])
    assert not np.isfinite(logprobs[0])
