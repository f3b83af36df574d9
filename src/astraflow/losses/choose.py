"""From a loss's name in the settings to the function."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

from astraflow.errors import ConfigError
from astraflow.losses import m2po, online_dpo, vapo
from astraflow.losses.base import LossInputs, LossOutput
from astraflow.losses.decoupled_ppo import decoupled_ppo
from astraflow.losses.grpo import grpo
from astraflow.losses.kimi import kimi
from astraflow.losses.sapo import sapo
from astraflow.losses.sft import sft
from astraflow.losses.topr import topr


class Chosen(NamedTuple):
    """A loss as a backend uses it."""

    loss: Callable[..., LossOutput]
    prepare: Callable[..., LossInputs] | None = None
    """``prepare(inputs, **options)``: what the loss decides over the whole batch (a budget, a normalisation), once,
    without a gradient. Its result, cut into parts, is what the loss then gets. None: the loss needs no such thing."""


LOSSES: dict[str, Chosen] = {
    "grpo": Chosen(grpo),
    "sft": Chosen(sft),
    "decoupled_ppo": Chosen(decoupled_ppo),
    "m2po": Chosen(m2po.m2po, m2po.prepare),
    "topr": Chosen(topr),
    "sapo": Chosen(sapo),
    "online_dpo": Chosen(online_dpo.online_dpo, online_dpo.prepare),
    "vapo": Chosen(vapo.vapo, vapo.prepare),
    "value_pretraining": Chosen(vapo.value_pretraining),
    "kimi": Chosen(kimi),
}
"""Options, ranges and needed columns of each are in ``astraflow.loss_options``."""


def choose_loss(name: str) -> Chosen:
    """One of ``LOSSES``, or ``package.module:function``. Raises ConfigError."""
    if name in LOSSES:
        return LOSSES[name]
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"LossSettings.name {name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ConfigError(f"LossSettings.name {name!r} is not callable")
    return Chosen(found)
