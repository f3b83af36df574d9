"""The bench measures what it says: same tokens, same loss on both sides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from astraflow.backends.models import load_model
from astraflow.backends.torch_single import TorchBackend
from astraflow.run.bench import trainer as bench
from astraflow.trainer.settings import TrainerSettings


@pytest.fixture
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LONGEST", 48)


@pytest.mark.usefixtures("short_rows")
def test_result_has_the_promised_keys(llama: Path) -> None:
    result = bench.run(model_dir=llama, rows=5, repeats=1, threads=1)
    assert {"packed_tokens_per_s", "padded_tokens_per_s", "ratio"} <= result.keys()
    assert result["ratio"] == pytest.approx(result["packed_tokens_per_s"] / result["padded_tokens_per_s"])
    json.dumps(result)


@pytest.mark.usefixtures("short_rows")
def test_both_sides_compute_the_same_loss(llama: Path) -> None:
    batch = bench.make_batch(rows=6, seed=1, vocabulary=90)
    settings = TrainerSettings(dtype="float32", tokens_per_micro_batch=100)
    packed = TorchBackend(llama, settings, steps=1).step(batch).metrics["loss/total"]
    model = load_model(llama, torch.device("cpu"))
    parts = bench._micro_batches(batch.rows, 100)
    assert len(parts) > 1 and sum(len(part) for part in parts) == 6
    with torch.no_grad():
        padded = sum(float(bench._padded_loss(model, p, batch.tokens, torch.device("cpu"))) for p in parts)
    assert packed == pytest.approx(padded, rel=1e-5)
