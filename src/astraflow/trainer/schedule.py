"""Learning rate by optimiser step. Step s (from 1) makes version s, so nothing but the version is ever stored (F68)."""

from __future__ import annotations

import math

from astraflow.trainer.settings import TrainerSettings


def learning_rate(settings: TrainerSettings, *, step: int, steps: int, supervised: bool = False) -> float:
    """Of step ``step`` (from 1) in a run of ``steps``. ``supervised``: every row of the batch is."""
    base = settings.lr
    if supervised and settings.lr_supervised is not None:
        base = settings.lr_supervised
    return base * _factor(settings, step=step, steps=steps)


def _factor(settings: TrainerSettings, *, step: int, steps: int) -> float:
    warmup = settings.warmup_steps
    if step <= warmup:
        return step / warmup
    if settings.schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup - 1) / max(1, steps - warmup))
    return 1.0 - done if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
