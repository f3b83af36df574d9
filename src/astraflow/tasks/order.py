"""Random order that is the same on every machine and in every version of numpy.

Only raw bits of PCG64 are used: numpy promises that streams of bits never change, not what its Generator makes of them.
Nothing depends on ``hash()``, on the order of sets, on time or on threads (F70).
"""

from __future__ import annotations

import numpy as np

from astraflow.types import Array


def permutation(size: int, *, seed: tuple[int, ...]) -> Array:
    """int64 [size]: the numbers below ``size`` in the order that belongs to ``seed``."""
    keys = np.random.PCG64(list(seed)).random_raw(size)
    return np.argsort(keys, kind="stable").astype(np.int64)


def uniform(*, seed: tuple[int, ...]) -> float:
    """The number in [0, 1) that belongs to ``seed``."""
    return float(int(np.random.PCG64(list(seed)).random_raw()) >> 11) * 2.0**-53
