"""pass@k without bias: the chance that k of n attempts, drawn without replacement, hold a correct one (F107)."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from math import comb, fsum

from astraflow.errors import ConfigError


def pass_at_k(*, attempts: int, correct: int, k: int) -> float:
    """``1 - C(n - c, k) / C(n, k)`` of one task. Raises ConfigError when k is more than the attempts: no estimate."""
    if not 1 <= k <= attempts:
        raise ConfigError(f"pass@{k} needs k from 1 to the attempts per task, found {attempts} attempts")
    if not 0 <= correct <= attempts:
        raise ConfigError(f"pass@{k}: correct must be from 0 to {attempts} attempts, found {correct}")
    return float(1 - Fraction(comb(attempts - correct, k), comb(attempts, k)))


def draws(attempts: int) -> list[int]:
    """The k that are shown of so many attempts: 1, 2, 4 … and all of them."""
    return sorted({attempts, *(1 << n for n in range(attempts.bit_length()) if 1 << n <= attempts)})


def mean_pass_at_k(tasks: Iterable[tuple[int, int]], *, k: int) -> float:
    """Mean over tasks of (attempts, correct); never a rate pooled over tasks. Every task needs at least k attempts."""
    values = [pass_at_k(attempts=attempts, correct=correct, k=k) for attempts, correct in tasks]
    if not values:
        raise ConfigError(f"pass@{k} of no tasks")
    return fsum(values) / len(values)
