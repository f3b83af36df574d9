"""A KL term in a real step: it needs no rewards to act, acts towards version 0, and costs nothing where it is off."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from astraflow.backends.torch_single import TorchBackend
from astraflow.testing.check_backend import with_advantage
from astraflow.trainer.settings import LossSettings, TrainerSettings
from astraflow.types import AdvantageRun, Batch
from tests.unit.backends.rows import make_batch
from tests.unit.backends.test_columns import backend


def test_without_kl_equal_rewards_are_no_signal_and_no_reference_is_loaded(llama: Path) -> None:
    made = backend(llama, "grpo")
    assert made._reference is None
    report = made.step(with_advantage(make_batch(1), 0.0))
    assert (report.updated, report.reason) == (False, "no_signal")


@pytest.mark.parametrize("kl", ["k2_in_loss", "k3_in_loss"])
def test_with_kl_equal_rewards_lead_back_to_the_reference(llama: Path, kl: str) -> None:
    loss = LossSettings(options={"kl": kl, "kl_coefficient": 1.0})
    settings = TrainerSettings(dtype="float32", betas=(0.0, 0.9), loss=loss)  # no momentum that would carry it away
    made = TorchBackend(llama, settings, steps=20, temperature=1.0, device="cpu")
    batch = make_batch(2)
    first = made.step(batch)
    assert first.metrics["loss/reference_kl"] == pytest.approx(0.0, abs=1e-9), "version 0 is the reference"
    for _ in range(5):
        made.step(batch)
    equal = with_advantage(batch, 0.0)
    reports = [made.step(equal) for _ in range(8)]
    assert all(report.updated for report in reports)
    apart = [report.metrics["loss/reference_kl"] for report in reports]
    assert 0 < apart[-1] < 0.8 * apart[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_f52_advantages_beyond_reason_leave_the_weights_alone(llama: Path, value: float) -> None:
    """1e30 is finite in the loss; its gradient's norm is not in float32, or is clipped to a direction: never NaN."""
    made = backend(llama, "grpo")
    before = made.digest()
    batch = make_batch(3)
    row = batch.rows[0]
    runs = tuple(AdvantageRun(start=run.start, stop=run.stop, value=value) for run in row.advantages)
    changed: Batch = msgspec.structs.replace(
        batch, rows=(msgspec.structs.replace(row, advantages=runs), *batch.rows[1:])
    )
    report = made.step(changed)
    if report.updated:
        assert value == 1e30 and math.isfinite(report.metrics["step/grad_norm"])
        assert all(bool(each.isfinite().all()) for each in made.tensors().values())
    else:
        assert report.reason == "non_finite" and made.digest() == before
