"""Losses as pure functions on packed tokens, ``loss(inputs, **options) -> LossOutput``. By name: ``LOSSES``."""

from astraflow.losses.aggregate import aggregate
from astraflow.losses.base import LossInputs, LossOutput
from astraflow.losses.choose import LOSSES, Chosen, choose_loss
from astraflow.losses.grpo import grpo
from astraflow.losses.sft import sft

__all__ = ["LOSSES", "Chosen", "LossInputs", "LossOutput", "aggregate", "choose_loss", "grpo", "sft"]
