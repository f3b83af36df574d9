"""What a recipe may choose about training one policy. Every bound is checked when the settings are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from astraflow.errors import ConfigError
from astraflow.loss_options import AGGREGATIONS, LOSSES, Value, check_options

COMMON = ("clip_low", "clip_high", "aggregation", "constant")
"""Options with a setting of their own."""
GAE_LAM = 0.95
"""Where the loss has none of its own; Schulman et al. 2016 find 0.9 to 0.99 good."""
SCHEDULES = ("constant", "linear", "cosine")
DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """Which loss ``rl`` rows take and its options; supervised rows always take ``sft`` with the same aggregation.

    None is the loss's own default. An option that the loss does not have is an error that names the nearest.
    """

    name: str = "grpo"
    """One of ``loss_options.LOSSES``, or ``package.module:function`` called as ``loss(inputs, **arguments)``."""
    clip_low: float | None = None
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float | None = None
    """The ratio is clipped above at 1 + clip_high."""
    aggregation: str | None = None
    constant: float | None = None
    """Divisor of ``sequence_sum_over_constant``, which needs it: the longest reply, for example."""
    options: dict[str, Value] = field(default_factory=dict)
    """Further options, by name."""

    def __post_init__(self) -> None:
        twice = [name for name in COMMON if name in self.options]
        if twice:
            raise ConfigError(f"LossSettings.options: {twice[0]} is a setting of its own, LossSettings.{twice[0]}")
        if self.name in LOSSES:
            self._check_known()
        elif ":" not in self.name:
            check_options(self.name, {})
        elif self.aggregation not in (None, *AGGREGATIONS):
            raise ConfigError(
                f"LossSettings.aggregation must be one of {', '.join(AGGREGATIONS)}, found {self.aggregation!r}"
            )

    def _check_known(self) -> None:
        given = self.arguments
        check_options(self.name, given)
        aggregation, _ = self.aggregation_and_constant
        if aggregation != "sequence_sum_over_constant" and self.constant is not None:
            raise ConfigError(
                f"LossSettings.constant {self.constant} has no effect where aggregation is {aggregation!r}; "
                "leave it out"
            )
        idle = LOSSES[self.name].without_effect(given) or LOSSES[self.name].without_proximal(given)
        if idle:
            raise ConfigError(f"loss {self.name!r}: {idle}; leave it out")

    @property
    def arguments(self) -> dict[str, Value]:
        """Keyword arguments of the loss: what was given."""
        common = {name: getattr(self, name) for name in COMMON}
        return {**{name: value for name, value in common.items() if value is not None}, **self.options}

    @property
    def needs(self) -> frozenset[str]:
        """Columns of ``LossInputs`` beyond those that a batch brings. A loss by ``package.module:function``: none."""
        return frozenset(LOSSES[self.name].columns(self.arguments)) if self.name in LOSSES else frozenset()

    @property
    def needs_critic(self) -> bool:
        """Then the advantages are the trainer's, of rewards and values: the recipe's credit is ``Returns``."""
        return "values" in self.needs

    @property
    def aggregation_and_constant(self) -> tuple[str, float | None]:
        """As the loss has them after its defaults: supervised rows take the same."""
        options = LOSSES[self.name].options if self.name in LOSSES else LOSSES["sft"].options
        found = {name: options[name].default for name in ("aggregation", "constant") if name in options}
        found |= {name: value for name, value in self.arguments.items() if name in ("aggregation", "constant")}
        aggregation, constant = found.get("aggregation", "token_mean"), found.get("constant")
        assert isinstance(aggregation, str) and (constant is None or isinstance(constant, float | int))
        return aggregation, constant if aggregation == "sequence_sum_over_constant" else None


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticSettings:
    """The critic of a loss that needs values: ``vapo``, ``value_pretraining``, ``ppo`` with ``value_coefficient``.

    A second model of the policy's architecture that begins with its weights, with an optimiser of its own (the
    policy's betas, decay and clip_norm). It costs as much memory and time as the policy again.
    """

    lr: float = 1e-5
    """Constant."""
    gamma: float = 1.0
    """Discount of a token."""
    lam: float | None = None
    """Lambda of the advantages; None: the loss's own, by length for ``vapo`` (see ``alpha``), else 0.95."""
    alpha: float = 0.05
    """By length: lambda of a trajectory of l sampled tokens is 1 - 1 / (alpha l), 0 where it is shorter than
    1 / alpha."""
    lam_returns: float = 1.0
    """Lambda of what the critic is taught, apart from the policy's (VC-PPO): 1 is what was earned, without bias."""
    pretraining: int = 0
    """Of the recipe's steps, the first so many move the critic alone: they make versions with the same weights."""
    updates: int = 1
    """Optimiser steps of the critic on each batch, towards the same returns."""

    def __post_init__(self) -> None:
        _between("CriticSettings.lr", self.lr, 0, 1)
        for name in ("gamma", "lam", "lam_returns"):
            value = getattr(self, name)
            if value is not None:
                _between(f"CriticSettings.{name}", value, 0, 1)
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"CriticSettings.alpha must be finite and > 0, found {self.alpha}")
        for name, lowest in (("pretraining", 0), ("updates", 1)):
            if getattr(self, name) < lowest:
                raise ConfigError(f"CriticSettings.{name} must be at least {lowest}, found {getattr(self, name)}")

    def lam_for(self, loss: str) -> float | None:
        """None: by length."""
        return GAE_LAM if self.lam is None and loss != "vapo" else self.lam


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
    critic: CriticSettings = field(default_factory=CriticSettings)
    """Of use only where the loss needs values."""
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
        self._check_critic()

    def _check_critic(self) -> None:
        """Settings that contradict each other, or act on nothing, are both named (F98)."""
        loss, critic, where = self.loss, self.critic, "TrainerSettings.critic"
        if not loss.needs_critic:
            if critic != CriticSettings():
                more = "value_coefficient 0" if loss.name == "ppo" else "needs no values"
                raise ConfigError(f"{where} has no effect where the loss is {loss.name!r} ({more}); leave it out")
            return
        clip, lam = loss.arguments.get("value_clip"), critic.lam_for(loss.name)
        if clip is not None and critic.updates == 1:
            raise ConfigError(
                f"loss {loss.name!r}: value_clip {clip} has no effect where {where}.updates is 1, for the values are "
                "the old ones; raise updates, or leave value_clip out"
            )
        if critic.alpha != CriticSettings().alpha and lam is not None:
            raise ConfigError(
                f"{where}.alpha {critic.alpha} has no effect where lambda is {lam}: it is by length for 'vapo' and lam "
                "None; leave alpha out"
            )
        if loss.name == "value_pretraining" and critic.pretraining:
            raise ConfigError(
                f"{where}.pretraining {critic.pretraining} has no effect where the loss is 'value_pretraining', which "
                "never trains the policy; leave it out"
            )
        if loss.name == "vapo" and critic.lam_returns != 1 and loss.arguments.get("nll_weight", True):
            raise ConfigError(
                f"{where}.lam_returns is {critic.lam_returns} and loss 'vapo' tells positive examples by their return, "
                "of which values are then a part; use lam_returns=1, or nll_weight=0"
            )

    def pretraining_of(self, steps: int) -> int:
        """Of ``steps`` steps, those in which the critic learns alone."""
        if not self.loss.needs_critic:
            return 0
        return steps if self.loss.name == "value_pretraining" else self.critic.pretraining

    def check_steps(self, steps: int) -> None:
        """Refuse a schedule that cannot be run in ``steps`` optimiser steps."""
        alone = self.critic.pretraining
        if alone and alone >= steps > 0:
            raise ConfigError(
                f"TrainerSettings.critic.pretraining {alone} must be less than Recipe.steps {steps}: the policy would "
                "never be trained; lower the first or raise the second"
            )
        if self.schedule != "constant" and self.warmup_steps >= steps - alone and steps > 0:
            less = f" less critic.pretraining {alone}" if alone else ""
            raise ConfigError(
                f"TrainerSettings.warmup_steps {self.warmup_steps} must be less than Recipe.steps {steps}{less} where "
                f"schedule is {self.schedule!r}; lower the first or raise the second"
            )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, found {value!r}")


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} must be in [{low}, {high}], found {value}")
