"""Every loss, by its name in a recipe, makes good tokens likelier and bad ones unlikelier in a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astraflow.backends.scorer import Scorer
from astraflow.backends.torch_single import TorchBackend
from astraflow.loss_options import LOSSES
from astraflow.trainer.packing import pack
from astraflow.trainer.settings import LossSettings, TrainerSettings
from tests.unit.backends.rows import make_batch
from tests.unit.backends.test_columns import near

NEEDS = {"dr_grpo": {"constant": 8.0}}


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"value_pretraining"}))
def test_a_step_follows_the_sign_of_the_advantage(llama: Path, name: str) -> None:
    batch = near(llama, make_batch(4), spread=0.0)
    settings = TrainerSettings(dtype="float32", lr=1e-3, loss=LossSettings(name=name, **NEEDS.get(name, {})))
    made = TorchBackend(llama, settings, steps=4, temperature=1.0, device="cpu")

    def score() -> tuple[Any, Any]:
        (packed,) = pack(batch.rows, tokens_per_micro_batch=10_000)
        found = Scorer(made._model, made._attention, temperature=1.0)(packed).numpy().copy()
        return packed.advantages, found

    advantages, before = score()
    assert made.step(batch).updated
    _, after = score()
    moved = float(np.sum(np.sign(advantages) * (after - before)))
    assert moved > 0 and bool((advantages > 0).any() and (advantages < 0).any())
