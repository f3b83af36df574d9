"""Fixed prompts whose log-probs travel with a version: what an engine says to them shows what it computes with. Pure.

Warm prompts are the same in every version, so that a cache that was not emptied answers them wrongly; cold ones differ
with every version, so that no cache can know them. The template is proved by the text that a prompt was made of.

    cold and warm right ─► held     cold right, warm wrong ─► stale cache     cold wrong ─► by what is said instead

What it cannot see: an update that moves the log-probs by less than the tolerance of the engine's dtype. Where tensors
can be seen, bits are compared besides (``weights.attest``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from astraflow.types import Array, Canary, CanaryPrompt
from astraflow.weights.attest import Diagnosis, Finding


class Tolerance(NamedTuple):
    """By how much a log-prob may differ between two right computations of the same weights, in nats."""

    mean: float
    most: float


TOLERANCES = {
    "float32": Tolerance(mean=1e-4, most=1e-3),
    "float16": Tolerance(mean=0.01, most=0.06),
    "bfloat16": Tolerance(mean=0.06, most=0.4),
}
"""Of the coarser of the two computations. Set from the dtypes' rounding at logits of about 20; held by tests on tiny
models and by SmolLM2-135M. ``astraflow bench weights --parts drift`` measures the drift of a model beside them."""
LINEAR = 0.35
"""How far what is said may be, relatively, from what an update on another base would say."""
BETWEEN = 0.4
"""Cosine from which a deviation points from the new version to the one before: of 48 log-probs that differ by chance it
is 0 with a deviation of 0.14."""


def tolerance_of(*dtypes: str) -> Tolerance:
    """Of a comparison between computations in these. An unknown dtype is taken for the coarsest."""
    coarsest = max(TOLERANCES.values())
    return max(TOLERANCES.get(dtype, coarsest) for dtype in dtypes)


def check_template(canary: Canary, rendered: Sequence[Sequence[int] | None]) -> Finding | None:
    """None: the worker's template makes the same tokens of the same texts. ``rendered``: what it makes of each; None
    where a prompt has no text."""
    for prompt, tokens in zip(canary.prompts, rendered, strict=True):
        if tokens is not None and tuple(tokens) != prompt.tokens:
            same = (one == other for one, other in zip(tokens, prompt.tokens, strict=False))
            at = next((n for n, equal in enumerate(same) if not equal), min(len(tokens), len(prompt.tokens)))
            return Finding(
                Diagnosis.WRONG_TEMPLATE,
                f"{prompt.text[:40]!r} becomes {len(tokens)} tokens instead of {len(prompt.tokens)}, the first "
                f"different one at {at}",
            )
    return None


def check_canary(
    canary: Canary, said: Sequence[Array], *, dtype: str, earlier: Mapping[int, Canary] | None = None
) -> Finding | None:
    """None: the engine, which computes in ``dtype``, says what the publisher says, within the tolerance.

    ``earlier``: canaries of versions before this one, the newest of which was held last.
    """
    bound = tolerance_of(dtype, canary.dtype)
    gaps = [_gap(prompt, logprobs) for prompt, logprobs in zip(canary.prompts, said, strict=True)]
    cold = [gap for prompt, gap in zip(canary.prompts, gaps, strict=True) if prompt.cold]
    warm = [gap for prompt, gap in zip(canary.prompts, gaps, strict=True) if not prompt.cold]
    if not any(_beyond(part, bound) for part in (cold, warm)):
        return None
    mean, most = _size(cold + warm)
    what = (
        f"log-probs differ by {mean:.2g} on average, {most:.2g} at most; {dtype} may by {bound.mean:g}, {bound.most:g}"
    )
    if not np.isfinite(most):
        return Finding(Diagnosis.NUMERICS, f"{what} (some are not finite)")
    if 2 * sum(_within(each, bound) for each in cold) > len(cold):  # one may begin with a token that a cache knew
        return Finding(Diagnosis.STALE_CACHE, f"{what}; prompts that no cache can know are right")
    return _explain(canary, said, bound, what, earlier or {})


def _explain(
    canary: Canary, said: Sequence[Array], bound: Tolerance, what: str, earlier: Mapping[int, Canary]
) -> Finding:
    """Which version, or mixture of versions, would say this. By the warm prompts: older versions answered the same."""
    wants = _joined([np.array(prompt.logprobs) for prompt in canary.prompts if not prompt.cold])
    says = _joined([each for prompt, each in zip(canary.prompts, said, strict=True) if not prompt.cold])
    before = {version: found for version, each in earlier.items() if (found := _warm(each, canary)) is not None}
    off = says - wants
    for version in sorted(before, reverse=True):
        # Closer to that version than to this one, and not farther from it than rounding explains.
        if _within(says - before[version], bound) and np.abs(says - before[version]).mean() < np.abs(off).mean():
            return Finding(Diagnosis.NEVER_APPLIED, f"{what}; it answers as v{version} did")
    if not before:
        return Finding(Diagnosis.NUMERICS, what)
    last = before[max(before)]
    for version in sorted(before, reverse=True)[1:]:
        shift = before[version] - last  # to the first order, what the update on that base would be off by
        if not _within(shift, bound) and np.linalg.norm(off - shift) <= LINEAR * np.linalg.norm(shift):
            return Finding(Diagnosis.WRONG_BASE, f"{what}; it answers as if the update had been put on v{version}")
    back = last - wants
    cosine = float(off @ back) / max(1e-30, float(np.linalg.norm(off) * np.linalg.norm(back)))
    share = float(off @ back) / max(1e-30, float(back @ back))
    if cosine >= BETWEEN and share < 1:
        return Finding(Diagnosis.PARTIAL, f"{what}; it answers as if {1 - share:.0%} of the update were there")
    return Finding(Diagnosis.NUMERICS, what)


def _warm(other: Canary, canary: Canary) -> Array | None:
    """What another version said to the warm prompts; None if they were others."""
    asked = {(prompt.tokens, prompt.reply): prompt.logprobs for prompt in other.prompts}
    found = [asked.get((prompt.tokens, prompt.reply)) for prompt in canary.prompts if not prompt.cold]
    known = [np.array(each) for each in found if each is not None]
    return _joined(known) if known and len(known) == len(found) else None


def _gap(prompt: CanaryPrompt, said: Array) -> Array:
    if len(said) != len(prompt.logprobs):
        return np.full(1, np.inf)
    found: Array = np.abs(said.astype(np.float64) - np.array(prompt.logprobs))
    return found


def _beyond(gaps: Sequence[Array], bound: Tolerance) -> bool:
    return bool(gaps) and not _within(_joined(gaps), bound)


def _within(gap: Array, bound: Tolerance) -> bool:
    found = np.abs(gap)
    return bool(found.mean() <= bound.mean and found.max() <= bound.most)  # False where one is not a number


def _size(gaps: Sequence[Array]) -> tuple[float, float]:
    gap = _joined(gaps)
    return float(gap.mean()), float(gap.max())


def _joined(parts: Sequence[Array]) -> Array:
    found: Array = np.concatenate([np.zeros(0), *parts])
    return found
