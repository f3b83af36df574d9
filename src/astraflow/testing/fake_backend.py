"""A trainer backend without a model: numpy, real files, and an honest memory of what it has trained.

``FakeBackend`` counts every (sample_id, use) that it was given, in its own state, so that a checkpoint remembers what
is in these weights. The simulator judges "nothing trained twice" from that record, not from the ledger's.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from astraflow.trainer.backend import StepReport
from astraflow.types import Array, Batch
from astraflow.weights.digest import digest_tensors

STATE = "state.safetensors"
EXTRA = "extra.json"


class FakeBackend:
    """Implements ``trainer.backend.Backend``. The same batches in the same order give the same bits."""

    def __init__(
        self,
        *,
        size: int = 8,
        before_step: Callable[[Batch], None] | None = None,
        is_dull: Callable[[Batch], bool] = lambda _: False,
    ) -> None:
        """``before_step`` may raise: a batch that kills its trainer, or one that the machine cannot hold. ``is_dull``:
        a batch that has no signal whatever its advantages say."""
        self.trained: Counter[tuple[str, int]] = Counter()
        """How often each (sample_id, use) is in these weights."""
        self.batches: list[int] = []
        """Ids of the batches that are in these weights, in order."""
        self.ages: list[int] = []
        """Staleness of every trained row, as this trainer saw it."""
        self._before_step = before_step
        self._is_dull = is_dull
        self._version = 0
        self._weights: Array = np.linspace(-1.0, 1.0, size, dtype=np.float32)

    @property
    def version(self) -> int:
        return self._version

    def step(self, batch: Batch) -> StepReport:
        if self._before_step is not None:
            self._before_step(batch)
        rows = [row for row in batch.rows if row.mask.any()]
        if self._is_dull(batch) or not any(run.value for row in rows for run in row.advantages):
            return StepReport(updated=False, reason="no_signal")
        self._weights = self._weights + _direction(batch, len(self._weights))
        self._version += 1
        trained = tuple((row.sample_id, row.use) for row in rows)
        self.trained.update(trained)
        self.batches.append(batch.id)
        for row in rows:
            if row.spans:
                self.ages.append(max(0, batch.version - min(span.version for span in row.spans)))
        metrics = {"loss": float(np.abs(self._weights).sum()), "tokens": float(batch.tokens)}
        return StepReport(updated=True, metrics=metrics, trained=trained)

    def tensors(self) -> dict[str, Array]:
        return {"w": self._weights}

    def export(self, folder: Path) -> list[Path]:
        path = folder / "model.safetensors"
        save_file(self.tensors(), path)
        return [path]

    def digest(self) -> str:
        return digest_tensors(self.tensors())

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        save_file(self.tensors(), folder / STATE)
        own = {
            "version": self._version,
            "batches": self.batches,
            "ages": self.ages,
            "trained": [[sample_id, use, count] for (sample_id, use), count in self.trained.items()],
        }
        (folder / EXTRA).write_text(json.dumps({"own": own, "extra": extra}))

    def load(self, folder: Path) -> dict[str, Any]:
        self._weights = load_file(folder / STATE)["w"]
        saved: dict[str, Any] = json.loads((folder / EXTRA).read_text())
        own = saved["own"]
        self._version = own["version"]
        self.batches = list(own["batches"])
        self.ages = list(own["ages"])
        self.trained = Counter({(sample_id, use): count for sample_id, use, count in own["trained"]})
        extra: dict[str, Any] = saved["extra"]
        return extra

    def close(self) -> None:
        return None


def _direction(batch: Batch, size: int) -> Array:
    """A step that depends on every row in its place: a batch re-issued in another order shows in the digest."""
    seen = hashlib.sha256()
    for row in batch.rows:
        seen.update(row.sample_id.encode())
        seen.update(row.tokens.tobytes())
        seen.update(row.mask.tobytes())
        seen.update(repr([(run.start, run.stop, run.value) for run in row.advantages]).encode())
    seed = int.from_bytes(seen.digest()[:8], "little")
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32) * np.float32(0.01)
