"""From a loss's name in the settings to the function."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

from astraflow.errors import ConfigError
from astraflow.losses.base import LossInputs, LossOutput
from astraflow.losses.cispo import cispo
from astraflow.losses.decoupled_ppo import decoupled_ppo
from astraflow.losses.grpo import dapo, dr_grpo, grpo
from astraflow.losses.gspo import gspo
from astraflow.losses.kimi import kimi
from astraflow.losses.m2po import m2po
from astraflow.losses.m2po import prepare as prepare_m2po
from astraflow.losses.mismatch import mis, tis
from astraflow.losses.online_dpo import online_dpo
from astraflow.losses.online_dpo import prepare as prepare_online_dpo
from astraflow.losses.ppo import ppo
from astraflow.losses.reinforce_plus_plus import prepare as prepare_reinforce_plus_plus
from astraflow.losses.reinforce_plus_plus import reinforce_plus_plus
from astraflow.losses.rloo import rloo
from astraflow.losses.sapo import sapo
from astraflow.losses.sft import sft
from astraflow.losses.topr import topr
from astraflow.losses.vapo import prepare as prepare_vapo
from astraflow.losses.vapo import value_pretraining, vapo


class Chosen(NamedTuple):
    """A loss as a backend uses it."""

    loss: Callable[..., LossOutput]
    prepare: Callable[..., LossInputs] | None = None
    """``prepare(inputs, **options)``: what the loss decides over the whole batch (a budget, a normalisation), once,
    without a gradient. Its result, cut into parts, is what the loss then gets. None: the loss needs no such thing."""


LOSSES: dict[str, Chosen] = {
    "ppo": Chosen(ppo),
    "grpo": Chosen(grpo),
    "dr_grpo": Chosen(dr_grpo),
    "dapo": Chosen(dapo),
    "gspo": Chosen(gspo),
    "cispo": Chosen(cispo),
    "rloo": Chosen(rloo),
    "reinforce_plus_plus": Chosen(reinforce_plus_plus, prepare_reinforce_plus_plus),
    "tis": Chosen(tis),
    "mis": Chosen(mis),
    "sft": Chosen(sft),
    "decoupled_ppo": Chosen(decoupled_ppo),
    "m2po": Chosen(m2po, prepare_m2po),
    "topr": Chosen(topr),
    "sapo": Chosen(sapo),
    "online_dpo": Chosen(online_dpo, prepare_online_dpo),
    "vapo": Chosen(vapo, prepare_vapo),
    "value_pretraining": Chosen(value_pretraining),
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
