"""How long a run may take on this machine, said before it starts: from its arithmetic and one quick measurement."""

from __future__ import annotations

import time

import numpy as np

from astraflow.run.plan import parameters_of
from astraflow.run.recipe import Recipe

PROMPT_TOKENS = 50
"""Of a group, shared: a guess, since prompts are made by the workflow."""


def estimate_line(recipe: Recipe) -> str:
    """One sentence; how sure it is depends on prompts and reply lengths that only the run knows."""
    sizes = [parameters_of(policy) for policy in recipe.policies.values() if policy.trainable]
    if not recipe.steps or not sizes or any(size is None for size in sizes):
        return "estimate: none, the model is not built yet"
    flops = measured_flops()
    steps = [recipe.steps_of(name) for name in recipe.trainable]
    tokens = [_tokens(recipe, recipe.policies[name].groups_per_batch) for name in recipe.trainable]
    work = sum(6.0 * (size or 0) * count * own for size, count, own in zip(sizes, tokens, steps, strict=True))
    seconds = work / flops + 0.2 * max(steps)
    least, most = _words(0.7 * seconds), _words(2.5 * seconds)
    return f"estimate: {least} to {most} on this machine ({flops / 1e9:.0f} GFLOP/s measured)"


def _tokens(recipe: Recipe, groups: int) -> float:
    """Of one step, forward and backward; sampling them costs about as much again and runs beside."""
    return groups * (PROMPT_TOKENS + recipe.group_size * min(recipe.sampling.max_tokens, 256))


def measured_flops(seconds: float = 0.2) -> float:
    """Of a float32 matrix product on the cores of this process: the best of many, as others come and go."""
    a = np.ones((512, 512), np.float32)
    b = a.copy()
    _ = a @ b
    best, until = float("inf"), time.perf_counter() + seconds
    while (began := time.perf_counter()) < until or best == float("inf"):
        _ = a @ b
        best = min(best, time.perf_counter() - began)
    return 2 * 512**3 / best


def _words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
