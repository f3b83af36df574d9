"""Counter-based randomness: the draw of token n of a request depends on (seed, n) alone, on any machine."""

from __future__ import annotations

import numpy as np

from astraflow.types import Array

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """In [0, 1), 53 bits. ``seed`` may be any int (its low 64 bits count), ``position`` >= 0."""
    bits = _mix((_mix(seed & _MASK) + _GOLDEN * (position + 1)) & _MASK)
    return (bits >> 11) * 2.0**-53


def uniforms(seeds: list[int], positions: list[int]) -> Array:
    """float64 [B]: ``uniform`` of each pair."""
    return np.array([uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)], np.float64)


def _mix(value: int) -> int:
    """SplitMix64: a bijection of 64-bit ints whose neighbours look independent."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
