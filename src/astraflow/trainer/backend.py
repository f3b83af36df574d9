"""What the training loop asks of a trainer backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from astraflow.types import Batch, Record


class StepReport(Record, frozen=True, kw_only=True):
    """What one optimiser step did. Metrics are already reduced over the whole batch from (sum, count) pairs (F106)."""

    updated: bool
    """False: weights, optimiser and schedule are untouched, for ``reason``."""
    reason: str | None = None
    """``no_signal`` (every gradient is exactly zero by data) or ``non_finite``."""
    metrics: dict[str, float] = {}
    trained: tuple[tuple[str, int], ...] = ()
    """(sample_id, use) that had a trained token."""


class Backend(Protocol):
    """Holds the weights (fp32 masters), the optimiser and the schedule of one policy."""

    @property
    def version(self) -> int:
        """Committed steps in these weights: the optimiser's own count."""

    def step(self, batch: Batch) -> StepReport:
        """One optimiser step, or none with a reason. Blocking: the loop calls it in a thread."""

    def export(self, folder: Path) -> list[Path]:
        """Write the weights as bf16 safetensors (fp32 if the recipe says so) into an empty folder."""

    def digest(self) -> str:
        """Of the exported weights."""

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Everything needed to go on bit for bit, with ``extra`` (plain JSON) beside it. The caller renames."""

    def load(self, folder: Path) -> dict[str, Any]:
        """The counterpart; returns ``extra``."""

    def close(self) -> None: ...
