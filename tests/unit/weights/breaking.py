"""Applying a delta breaks off in the middle."""

from __future__ import annotations

import pytest

from astraflow.weights.delta_classes import Operation
from astraflow.weights.delta_write import Write


def break_at(patch: pytest.MonkeyPatch, fatal: int, error: type[BaseException]) -> None:
    """A write fails before the ``fatal``-th operation of each tensor, counted from 0."""
    true_add, true_run, left = Write._add, Operation.run, 0

    def add(self: Write, number: int) -> None:
        nonlocal left
        left = fatal
        true_add(self, number)

    def run(self: Operation) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise error
        true_run(self)

    patch.setattr(Write, "_add", add)
    patch.setattr(Operation, "run", run)
