"""Packed rows against padded batches: the same model, rows, optimiser and precision; lengths uniform in 16 … 512.

The rival does what a plain training script does: rows in their order, padded to the longest of a micro-batch, logits
everywhere. No row shares a beginning with another, so this measures packing alone; shared prompts come on top.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from astraflow.backends.masters import Masters
from astraflow.backends.models import choose_device, choose_dtype, load_model
from astraflow.backends.torch_single import TorchBackend
from astraflow.run.models import get
from astraflow.trainer.settings import TrainerSettings
from astraflow.types import AdvantageRun, Batch, Row, SampleKind

SHORTEST, LONGEST = 16, 512
PROMPT_SHARE = 0.25


def main() -> dict[str, Any]:
    return run()


def run(
    *, model_dir: Path | None = None, rows: int = 16, repeats: int = 2, seed: int = 0, threads: int = 0
) -> dict[str, Any]:
    """{packed_tokens_per_s, padded_tokens_per_s, ratio, …}: real tokens of a batch over the best of ``repeats``."""
    folder = model_dir or get("smollm2")
    if threads:
        torch.set_num_threads(threads)
    settings = TrainerSettings(lr=1e-6)
    batch = make_batch(rows=rows, seed=seed, vocabulary=_vocabulary(folder))
    tokens = sum(len(row.tokens) for row in batch.rows)
    packed_s = _best(_packed(folder, settings, batch), repeats)
    padded_s = _best(_padded(folder, settings, batch), repeats)
    return {
        "packed_tokens_per_s": tokens / packed_s,
        "padded_tokens_per_s": tokens / padded_s,
        "ratio": padded_s / packed_s,
        "tokens": tokens,
        "rows": rows,
        "threads": torch.get_num_threads(),
        "model": folder.name,
    }


def make_batch(*, rows: int, seed: int, vocabulary: int) -> Batch:
    """Supervised rows: a quarter is prompt, the rest is trained."""
    random = np.random.default_rng(seed)
    made = []
    for n in range(rows):
        length = int(random.integers(SHORTEST, LONGEST + 1))
        mask = np.arange(length) >= max(1, int(length * PROMPT_SHARE))
        start = int(mask.argmax())
        made.append(
            Row(
                sample_id=f"{n}/0/a/0",
                tokens=random.integers(0, vocabulary, length).astype(np.int32),
                mask=mask,
                logprobs=np.zeros(length, np.float32),
                advantages=(AdvantageRun(start=start, stop=length, value=1.0),),
                kind=SampleKind.SUPERVISED,
            )
        )
    trained = sum(int(row.mask.sum()) for row in made)
    return Batch(id=1, policy="p", version=0, trainer_epoch=1, tokens=trained, sequences=rows, rows=tuple(made))


def _packed(folder: Path, settings: TrainerSettings, batch: Batch) -> Callable[[], None]:
    backend = TorchBackend(folder, settings, steps=1)

    def step() -> None:
        assert backend.step(batch).updated

    return step


def _padded(folder: Path, settings: TrainerSettings, batch: Batch) -> Callable[[], None]:
    device = choose_device("auto")
    model = load_model(folder, device)
    dtype = choose_dtype("auto", parameters=model.num_parameters(), device=device)
    masters = Masters(model.named_parameters(), compute=dtype)

    def step() -> None:
        for part in _micro_batches(batch.rows, settings.tokens_per_micro_batch):
            torch.autograd.backward(_padded_loss(model, part, batch.tokens, device))
        masters.update(settings, lr=settings.lr, norm=masters.gradient_norm())

    return step


def _micro_batches(rows: Sequence[Row], budget: int) -> list[list[Row]]:
    """In order; padding counts."""
    parts: list[list[Row]] = [[]]
    for row in rows:
        longest = max(len(each.tokens) for each in (*parts[-1], row))
        if parts[-1] and longest * (len(parts[-1]) + 1) > budget:
            parts.append([])
        parts[-1].append(row)
    return parts


def _padded_loss(model: Any, rows: Sequence[Row], denominator: int, device: torch.device) -> torch.Tensor:
    longest = max(len(row.tokens) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    present, trained = torch.zeros_like(ids), torch.zeros(len(rows), longest, dtype=torch.bool)
    for n, row in enumerate(rows):
        ids[n, : len(row.tokens)] = torch.from_numpy(row.tokens)
        present[n, : len(row.tokens)] = 1
        trained[n, : len(row.tokens)] = torch.from_numpy(row.mask)
    ids, present, trained = ids.to(device), present.to(device), trained.to(device)
    logits = model(input_ids=ids, attention_mask=present, use_cache=False).logits[:, :-1].float()
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return losses[trained[:, 1:]].sum() / denominator


def _best(step: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return min(times)


def _vocabulary(folder: Path) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(folder).get_text_config().vocab_size)
