"""From a loss's name in the settings to the function."""

from __future__ import annotations

import importlib

from astraflow.errors import ConfigError
from astraflow.losses.base import Loss
from astraflow.losses.grpo import grpo


def choose_loss(name: str) -> Loss:
    """``grpo``, or ``package.module:function``. Raises ConfigError."""
    if name == "grpo":
        return grpo  # type: ignore[return-value]  # its options are named and typed, the protocol's are not
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"LossSettings.name {name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ConfigError(f"LossSettings.name {name!r} is not callable")
    return found  # type: ignore[no-any-return]
