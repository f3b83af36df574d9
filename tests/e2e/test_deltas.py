"""A run whose versions travel as deltas: every span's weights are the published ones, in a fraction of the bytes; also
when the trainer is killed between the files of one publication."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from astraflow.observe import points
from astraflow.run.run_db import open_run_db
from astraflow.types import Manifest
from astraflow.weights.digest import digest_files
from astraflow.wire.codec import decode
from astraflow.wire.messages import ComponentReport
from tests.e2e.conftest import GOOD, Cli
from tests.e2e.test_kill import output, started, version_of, wait_for
from tests.e2e.test_run import check_ended

pytestmark = pytest.mark.slow
BF16 = ('characters="0123456789")', 'characters="0123456789", dtype="bfloat16")')
UNHURRIED = f"import asyncio; await asyncio.sleep(0.3)\n    {GOOD}"
"""So that there are heartbeats, which tell what was pulled, between the first version and the last."""
STEPS = 20
PATIENCE_S = 400.0


@pytest.fixture
def recipe(write_recipe: Callable[..., Path]) -> Path:
    """bf16 weights at a learning rate at which few of them move at a step, as in training of large models."""
    path = write_recipe(UNHURRIED, change=BF16)
    path.write_text(path.read_text().replace("lr=1e-4", "lr=2e-6"))
    return path


def published(run: Path) -> list[Manifest]:
    with sqlite3.connect(run / "run.db") as db:
        rows = db.execute("SELECT manifest FROM publications ORDER BY serial").fetchall()
    db.close()
    return [decode(blob, Manifest) for (blob,) in rows]


def worker(run: Path) -> dict[str, float]:
    """Counters of the rollout service, as it told them last."""
    with sqlite3.connect(run / "run.db") as db:
        (blob,) = db.execute("SELECT report FROM components WHERE component = 'rollout'").fetchone()
    db.close()
    return decode(blob, ComponentReport).metrics


def check_spans(run: Path, manifests: list[Manifest]) -> set[int]:
    """Versions that played; each span names one that was published, by its digest."""
    known = {(each.version, each.digest) for each in manifests}
    spans = set()
    with open_run_db(run / "run.db") as db:
        for group, index in db.connection.execute("SELECT group_id, idx FROM payloads").fetchall():
            episode = db.episode(group, index, run / "payloads")
            assert episode is not None
            spans |= {(s.version, s.digest) for t in episode.trajectories for x in t.samples for s in x.spans}
    assert spans and spans <= known
    return {version for version, _ in spans}


def test_versions_travel_as_deltas(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = cli(
        "run", recipe, "--run-dir", run, "--set", f"steps={STEPS}", "--set", "limits.retain=all", timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    check_ended(run, steps=STEPS)
    manifests = published(run)
    assert [each.version for each in manifests] == list(range(STEPS + 1))
    full = manifests[0].files[0].size_bytes
    anchors = [each.version for each in manifests if not each.files_digest]
    assert anchors == [0, 16]  # version 0, and one every 16
    assert all(each.deltas for each in manifests[1:])
    counters = worker(run)
    pulls = counters["weights/delta"]
    assert counters["weights/fallback"] == counters["weights/failures"] == 0 and pulls >= 3, counters
    assert counters["weights/bytes"] < 0.2 * full * pulls
    assert len(check_spans(run, manifests)) >= 3
    exported = cli("models", "export", run, tmp_path / "model")
    assert exported.returncode == 0, exported.stderr[-2000:]
    assert manifests[-1].files_digest and digest_files([tmp_path / "model/model.safetensors"]) == manifests[-1].digest


def test_kill_9_in_mid_publish(environment: dict[str, str], recipe: Path, tmp_path: Path) -> None:
    run, orders = tmp_path / "run", tmp_path / "orders"
    orders.mkdir()
    environment = {**environment, points.ENVIRONMENT: str(orders)}
    more = ("--set", f"steps={STEPS}", "--set", "limits.retain=all")
    with started(environment, recipe, run, *more) as process:
        for version in (3, 8):
            wait_for(f"version {version}", lambda version=version: version_of(run) >= version)  # type: ignore[misc]
            taken = points.give_order(orders, "trainer.in_publish")
            wait_for("a trainer in mid-publish", taken.exists)
            taken.unlink()
        assert process.wait(timeout=PATIENCE_S) == 0, output(run)[-3000:]
    assert output(run).count("died with signal SIGKILL") == 2
    check_ended(run, steps=STEPS)
    manifests = published(run)
    assert len(manifests) > STEPS + 1  # what was resumed at was published again, in full
    assert worker(run)["weights/fallback"] == worker(run)["weights/failures"] == 0
    check_spans(run, manifests)
