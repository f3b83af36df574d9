"""A training step against the same step written plainly: one row at a time, autograd, torch's own optimiser.

The reference below (at most 80 lines) shares no code with the trainer: no packing, no shared prompts, no head of ours.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from astraflow.backends.torch_single import TorchBackend
from astraflow.run.tiny_model import TinyModel
from astraflow.trainer.settings import LossSettings, TrainerSettings
from astraflow.types import Batch, Row
from tests.unit.backends.rows import make_batch

# ── the reference ──


class Reference:
    """GRPO on the rl rows of a batch and cross entropy on the supervised ones."""

    def __init__(self, folder: Path, settings: TrainerSettings, temperature: float) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.settings = settings
        self.temperature = temperature
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=1e-8, foreach=False)

    def step(self, batch: Batch) -> tuple[float, float]:
        """(loss, gradient norm before clipping)"""
        self.optimiser.zero_grad()
        losses = [self.row_loss(row, batch) for row in batch.rows if row.mask.any()]
        loss = torch.stack(losses).sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm or math.inf)
        self.optimiser.step()
        return float(loss.detach()), float(norm)

    def row_loss(self, row: Row, batch: Batch) -> torch.Tensor:
        supervised = row.kind.value == "supervised"
        temperature = 1.0 if supervised else self.temperature
        tokens = torch.from_numpy(row.tokens).long()
        logits = self.model(tokens[None]).logits[0, :-1] / temperature
        logprobs = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
        mask = torch.from_numpy(row.mask)[1:]
        per_token = -logprobs if supervised else self.clipped(row, logprobs)
        kept = per_token[mask]
        aggregation, constant = self.settings.loss.aggregation_and_constant
        if aggregation == "token_mean":
            return kept.sum() / batch.tokens
        if aggregation == "sequence_mean":
            return kept.mean() / batch.sequences
        assert constant is not None
        return kept.sum() / constant / batch.sequences

    def clipped(self, row: Row, logprobs: torch.Tensor) -> torch.Tensor:
        advantages = torch.zeros(len(row.tokens))
        for run in row.advantages:
            advantages[run.start : run.stop] = run.value
        ratio = (logprobs - torch.from_numpy(row.logprobs)[1:]).exp()
        low = 0.2 if self.settings.loss.clip_low is None else self.settings.loss.clip_low
        high = self.settings.loss.clip_high
        clipped = ratio.clamp(1 - low, 1 + (low if high is None else high))
        return -torch.minimum(advantages[1:] * ratio, advantages[1:] * clipped)


# ── the tests ──

CASES: dict[str, dict[str, Any]] = {
    "token_mean": {"loss": LossSettings(clip_high=0.28)},
    "sequence_mean": {"loss": LossSettings(aggregation="sequence_mean"), "clip_norm": 0.0},
    "constant": {"loss": LossSettings(aggregation="sequence_sum_over_constant", constant=8.0), "weight_decay": 0.1},
    "tight_clip": {"clip_norm": 0.01, "betas": (0.8, 0.95)},
}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    model = TinyModel(
        arch=request.param, hidden=48, layers=2, heads=4, kv_heads=2, intermediate=64, context=256, seed=5
    )
    return model.build(tmp_path_factory.mktemp("golden") / "model")


@pytest.mark.parametrize("case", CASES)
def test_three_steps_equal_the_plain_reference(folder: Path, case: str) -> None:
    settings = TrainerSettings(dtype="float32", lr=1e-3, tokens_per_micro_batch=70, **CASES[case])
    backend = TorchBackend(folder, settings, steps=3, temperature=0.8)
    reference = Reference(folder, settings, temperature=0.8)
    for n in range(3):
        batch = near_policy(make_batch(n, version=n, supervised=2), reference)
        report = backend.step(batch)
        loss, norm = reference.step(batch)
        assert report.metrics["loss/total"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
        assert report.metrics["step/grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert 0 < report.metrics["loss/clip_fraction"] < 1
    expected = dict(reference.model.named_parameters())
    for name, ours in backend._masters.tensors.items():
        # Adam divides by the root of the second moment: where a gradient is nearly 0, its rounding decides its sign
        difference = (ours - expected[name].detach()).abs()
        assert float(difference.max()) < 2e-4, name
        assert float(difference.mean()) < 1e-6, name


def near_policy(batch: Batch, reference: Reference) -> Batch:
    """Behaviour log-probs near the current ones: some ratios are clipped, most are not."""
    import msgspec

    random = np.random.default_rng(batch.id)
    rows = []
    for row in batch.rows:
        tokens = torch.from_numpy(row.tokens).long()
        with torch.no_grad():
            logits = reference.model(tokens[None]).logits[0, :-1] / reference.temperature
        now = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0].numpy()
        behaviour = np.zeros(len(tokens), np.float32)
        if row.kind.value == "rl":
            noise = random.normal(0, 0.2, len(now))
            behaviour[1:] = np.where(row.mask[1:], np.minimum(now + noise, 0), 0)
        rows.append(msgspec.structs.replace(row, logprobs=behaviour))
    return msgspec.structs.replace(batch, rows=tuple(rows))


def test_the_reference_stays_a_page() -> None:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    start, stop = lines.index("# ── the reference ──"), lines.index("# ── the tests ──")
    assert stop - start <= 80
