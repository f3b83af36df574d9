"""Losses as pure functions on packed tokens, ``loss(inputs, **options) -> LossOutput``. By name: ``LOSSES``."""

from astraflow.losses.aggregate import aggregate
from astraflow.losses.base import LossInputs, LossOutput
from astraflow.losses.choose import LOSSES, Chosen, choose_loss
from astraflow.losses.cispo import cispo
from astraflow.losses.decoupled_ppo import decoupled_ppo
from astraflow.losses.grpo import dapo, dr_grpo, grpo
from astraflow.losses.gspo import gspo
from astraflow.losses.kimi import kimi
from astraflow.losses.kl import estimate_kl
from astraflow.losses.m2po import m2po
from astraflow.losses.mismatch import mis, tis
from astraflow.losses.online_dpo import online_dpo
from astraflow.losses.ppo import ppo
from astraflow.losses.reinforce_plus_plus import reinforce_plus_plus
from astraflow.losses.rloo import rloo
from astraflow.losses.sapo import sapo
from astraflow.losses.sft import sft
from astraflow.losses.topr import topr
from astraflow.losses.vapo import value_pretraining, vapo

__all__ = [
    "LOSSES",
    "Chosen",
    "LossInputs",
    "LossOutput",
    "aggregate",
    "choose_loss",
    "cispo",
    "dapo",
    "decoupled_ppo",
    "dr_grpo",
    "estimate_kl",
    "grpo",
    "gspo",
    "kimi",
    "m2po",
    "mis",
    "online_dpo",
    "ppo",
    "reinforce_plus_plus",
    "rloo",
    "sapo",
    "sft",
    "tis",
    "topr",
    "value_pretraining",
    "vapo",
]
