from __future__ import annotations

from itertools import combinations

import pytest

from astraflow.algorithms.passk import mean_pass_at_k, pass_at_k
from astraflow.errors import ConfigError


@pytest.mark.parametrize(
    ("attempts", "correct", "k", "value"),
    [
        (4, 0, 1, 0.0), (4, 0, 2, 0.0), (4, 0, 4, 0.0),
        (4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 1, 4, 1.0),
        (4, 4, 1, 1.0), (4, 4, 2, 1.0), (4, 4, 4, 1.0),
        (10, 3, 5, 11 / 12),
    ],
)  # fmt: skip
def test_f107_pass_at_k(attempts, correct, k, value):
    assert pass_at_k(attempts=attempts, correct=correct, k=k) == pytest.approx(value, abs=1e-15)


@pytest.mark.parametrize("attempts", range(1, 7))
def test_f107_equals_counting_every_draw(attempts):
    for correct in range(attempts + 1):
        marks = [True] * correct + [False] * (attempts - correct)
        for k in range(1, attempts + 1):
            draws = list(combinations(marks, k))
            expected = sum(any(draw) for draw in draws) / len(draws)
            assert pass_at_k(attempts=attempts, correct=correct, k=k) == pytest.approx(expected, abs=1e-15)


def test_f107_more_than_the_attempts_is_refused_not_estimated():
    with pytest.raises(ConfigError, match="pass@5 needs k from 1 to the attempts per task, found 4"):
        pass_at_k(attempts=4, correct=1, k=5)
    with pytest.raises(ConfigError, match="pass@10"):
        mean_pass_at_k([(1, int(task < 50)) for task in range(164)], k=10)


def test_f107_a_mean_over_tasks_not_over_attempts():
    assert mean_pass_at_k([(4, 1), (2, 0)], k=2) == 0.25
    with pytest.raises(ConfigError, match="no tasks"):
        mean_pass_at_k([], k=1)


@pytest.mark.parametrize(("correct", "k"), [(5, 1), (-1, 1), (1, 0)])
def test_bad_counts(correct, k):
    with pytest.raises(ConfigError):
        pass_at_k(attempts=4, correct=correct, k=k)
