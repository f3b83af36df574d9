"""Every loss, by its name in a recipe, makes good tokens likelier and bad ones unlikelier in a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from astraflow.backends.scorer import Scorer
from astraflow.backends.torch_single import TorchBackend
from astraflow.loss_options import LOSSES
from astraflow.trainer.packing import pack
from astraflow.trainer.settings import LossSettings, TrainerSettings
from tests.unit.backends.rows import make_batch
from tests.unit.backends.test_columns import near

FAR = -80.0
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


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_f41_ratios_beyond_reason_move_nothing_to_infinity(llama: Path, name: str) -> None:
    """Behaviour log-probs of -80 and of 0 by turns: ratios of e^76 and of e^-4, in a real step of every loss."""
    batch = make_batch(5)
    rows = [
        msgspec.structs.replace(row, logprobs=np.where(row.mask, FAR * (n % 2), 0).astype(np.float32))
        for n, row in enumerate(batch.rows)
    ]
    settings = TrainerSettings(dtype="float32", lr=1e-3, loss=LossSettings(name=name, **NEEDS.get(name, {})))
    made = TorchBackend(llama, settings, steps=4, temperature=1.0, device="cpu")
    report = made.step(msgspec.structs.replace(batch, rows=tuple(rows)))
    if name == "mis":
        assert report.reason == "no_signal", "it rejects every one of them"
    else:
        assert report.updated or name == "kimi", report.reason
    assert all(bool(each.isfinite().all()) for each in made.tensors().values())
    if name not in ("sft", "value_pretraining"):
        assert report.metrics["loss/ratio_clamped"] > 0
