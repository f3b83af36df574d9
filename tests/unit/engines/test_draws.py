"""The draw of token n depends on (seed, n) alone, and looks random in both."""

from __future__ import annotations

import numpy as np

from astraflow.engines.draws import uniform, uniforms


def test_draws_do_not_drift() -> None:
    assert [round(uniform(0, n), 6) for n in range(3)] == [round(value, 6) for value in uniforms([0] * 3, [0, 1, 2])]
    assert uniform(1, 0) != uniform(0, 1)
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


def test_draws_are_uniform_over_seeds_and_over_positions() -> None:
    for values in (uniforms(list(range(20000)), [3] * 20000), uniforms([7] * 20000, list(range(20000)))):
        assert values.min() >= 0 and values.max() < 1
        counts = np.histogram(values, bins=20, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 45  # chi-square, 19 degrees of freedom, p = 0.0007
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03
