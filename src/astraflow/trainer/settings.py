"""What a recipe may choose about training one policy. Every bound is checked when the settings are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from astraflow.errors import ConfigError

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum_over_constant")
SCHEDULES = ("constant", "linear", "cosine")
DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """Which loss ``rl`` rows take and its options; supervised rows always take ``sft`` with the same aggregation."""

    name: str = "grpo"
    """``grpo``, or ``package.module:function`` called as ``loss(inputs, **options)`` with the fields below."""
    clip_low: float = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float | None = None
    """The ratio is clipped above at 1 + clip_high; None: clip_low."""
    aggregation: str = "token_mean"
    constant: float | None = None
    """Divisor of ``sequence_sum_over_constant``, which needs it: the longest reply, for example."""

    def __post_init__(self) -> None:
        if self.name != "grpo" and ":" not in self.name:
            raise ConfigError(f"LossSettings.name must be 'grpo' or 'package.module:function', found {self.name!r}")
        if not 0 <= self.clip_low < 1:
            raise ConfigError(f"LossSettings.clip_low must be in [0, 1), found {self.clip_low}")
        if self.clip_high is not None and not 0 <= self.clip_high < math.inf:
            raise ConfigError(f"LossSettings.clip_high must be finite and >= 0, found {self.clip_high}")
        _one_of("LossSettings.aggregation", self.aggregation, AGGREGATIONS)
        needs = self.aggregation == "sequence_sum_over_constant"
        if needs and (self.constant is None or not 0 < self.constant < math.inf):
            raise ConfigError(
                "LossSettings.constant must be finite and > 0 where aggregation is 'sequence_sum_over_constant', "
                f"found {self.constant}"
            )
        if not needs and self.constant is not None:
            raise ConfigError(
                f"LossSettings.constant {self.constant} has no effect where aggregation is {self.aggregation!r}; "
                "leave it out"
            )

    @property
    def options(self) -> dict[str, object]:
        """Keyword arguments of the loss."""
        high = self.clip_low if self.clip_high is None else self.clip_high
        return {
            "clip_low": self.clip_low,
            "clip_high": high,
            "aggregation": self.aggregation,
            "constant": self.constant,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings:
    """Optimiser, batching and checkpoints of one policy."""

    lr: float = 2e-5
    lr_supervised: float | None = None
    """Learning rate of a step whose rows are all supervised; None: ``lr``."""
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 is off."""
    schedule: str = "constant"
    """``constant``, or ``linear`` or ``cosine`` from the end of the warm-up to the last step."""
    warmup_steps: int = 0
    tokens_per_micro_batch: int = 2048
    """Most tokens of one packed row, shared prefixes counted once. Bounds memory; never changes the result."""
    loss: LossSettings = field(default_factory=LossSettings)
    temperature: float | None = None
    """Of the log-probs; None: the one that the recipe samples with, which is nearly always right."""
    dtype: str = "auto"
    """Of the computation; masters are fp32. ``auto``: bfloat16 where the machine is faster in it at this size."""
    threads: int = 0
    """Torch threads; 0 leaves what the launcher has set."""
    checkpoint_every: int = 20
    """Steps between two checkpoints."""
    checkpoints_kept: int = 2

    def __post_init__(self) -> None:
        _between("TrainerSettings.lr", self.lr, 0, 1)
        if self.lr_supervised is not None:
            _between("TrainerSettings.lr_supervised", self.lr_supervised, 0, 1)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"TrainerSettings.betas must be two numbers in [0, 1), found {self.betas}")
        _between("TrainerSettings.weight_decay", self.weight_decay, 0, 1)
        if not 0 <= self.clip_norm < math.inf:
            raise ConfigError(f"TrainerSettings.clip_norm must be finite and >= 0, found {self.clip_norm}")
        _one_of("TrainerSettings.schedule", self.schedule, SCHEDULES)
        _one_of("TrainerSettings.dtype", self.dtype, DTYPES)
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise ConfigError(f"TrainerSettings.temperature must be finite and > 0, found {self.temperature}")
        for name, lowest in (
            ("warmup_steps", 0),
            ("tokens_per_micro_batch", 1),
            ("threads", 0),
            ("checkpoint_every", 1),
            ("checkpoints_kept", 1),
        ):
            if getattr(self, name) < lowest:
                raise ConfigError(f"TrainerSettings.{name} must be at least {lowest}, found {getattr(self, name)}")

    def check_steps(self, steps: int) -> None:
        """Refuse a schedule that cannot be run in ``steps`` optimiser steps."""
        if self.schedule != "constant" and self.warmup_steps >= steps > 0:
            raise ConfigError(
                f"TrainerSettings.warmup_steps {self.warmup_steps} must be less than Recipe.steps {steps} where "
                f"schedule is {self.schedule!r}; lower the first or raise the second"
            )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, found {value!r}")


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} must be in [{low}, {high}], found {value}")
