"""A real run on a disk that fills up: it stops, says so, and goes on when there is room; nothing is half-written."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from astraflow.trainer.checkpoints import LOCK, OWNER
from tests.e2e.test_after_a_run import fill
from tests.e2e.test_hangs import status_of
from tests.e2e.test_kill import DEADLINE_S, output, started, version_of, wait_for
from tests.e2e.test_run import check_ended

pytestmark = pytest.mark.slow
STEPS = 60


def test_a_run_waits_for_space_and_ends_as_any_other(
    environment: dict[str, str], write_recipe: Callable[..., Path], tmp_path: Path, small_disk: Path
) -> None:
    """Ledger, payloads, weights, checkpoints, metrics and logs lie on the disk that is full."""
    run = small_disk / "run"
    more = ("--set", f"steps={STEPS}", "policies.main.trainer.checkpoint_every=1")
    with started(environment, write_recipe(), run, *more) as process:
        wait_for("the fifth step", lambda: version_of(run) >= 5)
        filler = fill(small_disk, leave=0)
        wait_for("the run to say so", lambda: "StorageFull" in (status_of(run).get("error") or ""))
        stopped = version_of(run)
        stays = time.monotonic() + 5
        wait_for("some seconds without space", lambda: time.monotonic() > stays)
        assert version_of(run) <= stopped + 1
        assert process.poll() is None
        status = status_of(run)
        assert (status["state"], "StorageFull" in status["error"]) == ("running", True)
        filler.unlink()
        assert process.wait(timeout=DEADLINE_S) == 0, output(run)[-3000:]
    check_ended(run, steps=STEPS)
    assert "died" not in output(run), "nobody had to be started again"
    checkpoints = {path.name for path in (run / "checkpoints" / "main").iterdir()}
    assert {name for name in checkpoints if not name.startswith("step-")} == {LOCK, OWNER}, checkpoints
    assert not list((run / "weights").glob(".part-*"))
