"""Means and deviations that no order of members changes: float64, every sum exactly rounded (F34, F36, F40).

Weights are how often a value counts (tokens of a unit); deviations are unbiased, with the sum of the weights less 1.
"""

from __future__ import annotations

import math

import numpy as np

from astraflow.types import Array

EPS = 1e-6
"""Added to a deviation."""
HUGE = 1e100
"""Beyond it a square would overflow: such values are brought to at most 1 first."""


def mean(values: Array, weights: Array | None = None) -> float:
    if weights is None:
        return math.fsum(values) / len(values)
    return math.fsum(values * weights) / math.fsum(weights)


def deviation(values: Array, weights: Array | None = None) -> float:
    """At least two values, or a weight of more than 1 in all."""
    squares = (values - mean(values, weights)) ** 2
    if weights is None:
        return math.sqrt(math.fsum(squares) / (len(values) - 1))
    return math.sqrt(math.fsum(squares * weights) / (math.fsum(weights) - 1))


def normalised(values: Array, weights: Array | None = None, *, std: bool = True) -> Array:
    """Less their mean, over their deviation if ``std``. All equal (compared exactly), or fewer than two: 0."""
    values = values.astype(np.float64)
    count = len(values) if weights is None else float(weights.sum())
    if len(values) == 0 or count < 2 or values.min() == values.max():
        return np.zeros(len(values))
    scale = scale_of(values)
    small = values / scale
    centred = small - mean(small, weights)
    if not std:
        return np.asarray(centred * scale)
    return np.asarray(centred / (deviation(small, weights) + EPS / scale))


def scale_of(values: Array) -> float:
    """What to divide by, lest squares overflow; 1 for all that is not absurd."""
    largest = float(np.abs(values).max())
    return largest if largest > HUGE else 1.0


def to_float32(values: Array) -> Array:
    """What float32 cannot hold becomes infinite, and whoever reads it refuses it by name."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)
