"""The benchmark of dataflow: every trajectory is delivered and committed, and its rivals do the same work."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from astraflow.run.bench import _rivals as rivals
from astraflow.run.bench._load import PER_BATCH, percentile
from astraflow.run.bench.dataflow import run


def test_it_runs_and_names_its_figures() -> None:
    found = run(trajectories=2 * PER_BATCH + 1, rival_trajectories=PER_BATCH, redis=False)
    assert found["trajectories"] == 2 * PER_BATCH
    assert found["sqlite_ratio"] == found["trajectories_per_s"] / found["sqlite_per_s"]
    assert 0 < found["lease_p50_ms"] <= found["lease_p99_ms"]
    assert found["server_cpu_us"] > 0


def test_without_redis_its_ratios_are_null_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    found = rivals.redis_figures(tmp_path, 1.0, PER_BATCH)
    assert found["redis_everysec_ratio"] is None and found["redis_always_ratio"] is None
    assert found["redis_reason"] == "redis-server is not installed"


@pytest.mark.skipif(shutil.which(rivals.REDIS) is None, reason="redis-server is not installed")
def test_redis_hands_over_the_same_trajectories(tmp_path: Path) -> None:
    found = rivals.redis_figures(tmp_path, 100.0, PER_BATCH)
    assert found["redis_always_ratio"] == 100.0 / found["redis_always_per_s"]


def test_percentiles_are_of_the_ordered_values() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([3.0], 0.99)) == (51.0, 100.0, 3.0)
