"""The draw of token n depends on (seed, n) alone, and looks random in both."""

from __future__ import annotations

import numpy as np

from astraflow.engines.draws import uniform, uniforms


def test_draws_do_not_drift() -> None:
    assert [uniform(0, 0), uniform(0, 1), uniform(12345, 7)] == [
        0.7012121095215252,
        0.3871241409757855,
        0.9722799137624002,
    ]
    assert uniforms([0, 12345], [1, 7]).tolist() == [uniform(0, 1), uniform(12345, 7)]
    assert uniform(1, 0) != uniform(0, 1)
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


def test_draws_are_uniform_over_seeds_and_over_positions() -> None:
    for values in (uniforms(list(range(20000)), [3] * 20000), uniforms([7] * 20000, list(range(20000)))):
        assert values.min() >= 0 and values.max() < 1
        counts = np.histogram(values, bins=20, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 45  # chi-square, 19 degrees of freedom, p = 0.0007
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03
