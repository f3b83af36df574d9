"""The measures of attestation, small: the names of faults, the drift that passes, the pause while weights are taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from astraflow.run.bench import faults as module
from astraflow.run.bench.drift import WAYS, drift
from astraflow.run.bench.faults import faults_named
from astraflow.run.bench.pause import _gaps, pause
from astraflow.run.bench.weights import PARTS
from astraflow.run.tiny_model import TinyModel
from astraflow.testing.faulty_engine import FAULTS


@pytest.fixture(scope="module")
def folder() -> Path:
    return TinyModel(hidden=32, layers=2, intermediate=64).build()


def test_what_is_printed_names_every_fault_and_how_many_names_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them only, and one that is named wrongly: the count is of right names, not of findings."""
    few = {name: FAULTS[name] for name in ("half-applied", "one flipped bit")}
    few["half-applied"] = (few["half-applied"][0], FAULTS["one flipped bit"][1])
    monkeypatch.setattr(module, "FAULTS", few)
    found = faults_named()
    assert found["tensors"]["named"] == "1 of 2"
    assert found["tensors"]["one flipped bit"].startswith("numerics: 1 bit")
    assert found["tensors"]["half-applied"].startswith("partial: ")
    assert set(found["canary_alone"]) == {"named", "s", *few}


def test_right_computations_of_a_tiny_model_are_within_the_tolerance_of_each_dtype(folder: Path) -> None:
    for dtype, found in drift(folder).items():
        mean, most = found["allowed"]
        assert found["mean"] <= mean and found["most"] <= most, (dtype, found)
        assert set(found["by_way"]) == set(WAYS)
    assert found["mean"] > 0  # the last one is no float32: it cannot be exact


def test_the_gap_between_steps_is_measured_while_weights_are_taken(folder: Path) -> None:
    found = pause(folder, slots=2, updates=1, quiet_steps=10)
    assert found["steps"][0] > 3 and found["decode_step_longest_ms"] >= found["decode_step_ms"] > 0
    assert 0 < found["swap_ms"] < found["step_while_updating_longest_ms"] + 1000
    assert found["pause_within"] == (found["pause_ms"] <= found["decode_step_ms"] + 10)
    assert _gaps([1.0, 2.0, 4.0, 9.0], 1.5, 5.0) == [1.0, 2.0, 5.0]


def test_the_bench_of_weights_has_these_parts() -> None:
    assert {"codec", "catch_up", "pause", "drift", "faults", "pools"} == PARTS.keys()
