"""What a sample refuses, by counts and extremes, is what its rules say token by token."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from astraflow.errors import InvalidRecord
from astraflow.types import Array, Sample, Span

SPOILED = (0.0, -0.5, 0.5, 0.0009, 0.0011, np.nan, np.inf, -np.inf)


def is_right(sampled: Array, logprobs: Array, spans: tuple[Span, ...]) -> bool:
    """The rules, one token after the other."""
    covered = [sum(span.start <= n < span.stop for span in spans) for n in range(len(sampled))]
    ordered = all(a.stop <= b.start for a, b in pairwise(spans))
    if not ordered or any(not 0 <= s.start < s.stop <= len(sampled) or s.version < 0 for s in spans):
        return False
    for n, is_sampled in enumerate(sampled):
        value = float(logprobs[n])
        if covered[n] != int(is_sampled):
            return False
        if is_sampled and not (np.isfinite(value) and value <= float(np.float32(1e-3))):
            return False
        if not is_sampled and value != 0.0:
            return False
    return True


def drawn(random: np.random.Generator) -> tuple[Array, Array, tuple[Span, ...]]:
    """Mostly right; sometimes a token, a log-prob or a span is spoiled."""
    edges = np.sort(random.choice(np.arange(1, 16), size=2 * int(random.integers(0, 4)), replace=False))
    spans = tuple(
        Span(start=int(a), stop=int(b), version=int(random.integers(0, 3)), digest="d")
        for a, b in zip(edges[::2], edges[1::2], strict=True)
    )
    sampled = np.zeros(16, np.bool_)
    for span in spans:
        sampled[span.start : span.stop] = True
    logprobs = np.where(sampled, -random.exponential(1.0, 16), 0.0).astype(np.float32)
    for _ in range(int(random.integers(0, 3))):
        at = int(random.integers(1, 16))
        what = random.integers(0, 4)
        if what == 0:
            sampled[at] = not sampled[at]
        elif what == 1:
            logprobs[at] = SPOILED[int(random.integers(0, len(SPOILED)))]
        elif what == 2 and spans:
            spans = spans[:-1]
        elif spans:
            first = spans[0]
            moved = Span(start=first.start, stop=first.stop + 1, version=int(random.integers(-1, 2)), digest="d")
            spans = (moved, *spans[1:])
    return sampled, logprobs, spans


@pytest.mark.parametrize("seed", range(8))
def test_it_refuses_exactly_what_the_rules_refuse(seed: int) -> None:
    random = np.random.default_rng(seed)
    found = {True: 0, False: 0}
    for _ in range(500):
        sampled, logprobs, spans = drawn(random)
        right = is_right(sampled, logprobs, spans)
        found[right] += 1
        try:
            Sample(tokens=np.arange(16, dtype=np.int32), sampled=sampled, logprobs=logprobs, spans=spans)
        except InvalidRecord:
            assert not right, (sampled, logprobs, spans)
        else:
            assert right, (sampled, logprobs, spans)
    assert min(found.values()) > 50


def test_a_negative_token_is_named() -> None:
    with pytest.raises(InvalidRecord, match="tokens must be >= 0, found -3"):
        Sample(tokens=np.array([1, -3], np.int32), sampled=np.zeros(2, np.bool_), logprobs=np.zeros(2, np.float32))
