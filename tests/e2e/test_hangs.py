"""Workflows that hang, in real processes: each ends by its limit, dataflow hears of it by name, the run goes on."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import GOOD, Cli
from tests.e2e.test_kill import DEADLINE_S, output, processes_of, started, version_of, wait_for
from tests.e2e.test_run import check_ended

pytestmark = pytest.mark.slow
STEPS = 6


def once(hang: str, marker: Path) -> str:
    """The first episode of the run hangs, all others are as always."""
    return "\n    ".join(
        (
            "import asyncio, pathlib, time",
            f"mark = pathlib.Path({str(marker)!r})",
            "if not mark.exists():",
            "    mark.touch()",
            *(f"    {line}" for line in hang.splitlines()),
            GOOD,
        )
    )


def status_of(run: Path) -> dict[str, Any]:
    """What dataflow says now; empty while it cannot be asked."""
    try:
        url = json.loads((run / "endpoint.json").read_text())["url"]
        token = json.loads((run / "tokens.json").read_text())["operator"]
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/status", headers=headers), timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except (OSError, ValueError, urllib.error.URLError):
        return {}


def failures_of(run: Path) -> list[dict[str, Any]]:
    db = sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True)
    try:
        return [json.loads(data) for (data,) in db.execute("SELECT data FROM events WHERE kind = 'failed'")]
    finally:
        db.close()


@pytest.mark.parametrize("hang", ["time.sleep(3600)", "while True:\n    pass"], ids=["sleep", "loop"])
def test_a_workflow_that_blocks_the_event_loop(
    environment: dict[str, str], write_recipe: Callable[..., Path], tmp_path: Path, hang: str
) -> None:
    """The worker's heartbeat hangs with it: a thread keeps the leases, names the line, and ends the process."""
    run = tmp_path / "run"
    recipe = write_recipe(once(hang, tmp_path / "hung"))
    more = ("--set", f"steps={STEPS}", "rollout.block_limit_s=8", "limits.time_limit_s=60")
    with started(environment, recipe, run, *more) as process:

        def blocked() -> list[str]:
            return [
                each["report"]["why"]
                for each in status_of(run).get("components", ())
                if each["state"] == "alive" and each["report"]["doing"] == "blocked"
            ]

        wait_for("dataflow to hear of the blocked loop", lambda: bool(blocked()) or process.poll() is not None)
        assert process.poll() is None, output(run)[-3000:]
        assert process.wait(timeout=DEADLINE_S) == 0, output(run)[-3000:]
    check_ended(run, steps=STEPS)
    (failure,) = failures_of(run)
    assert failure["failure"] == "timeout"
    assert "blocked the event loop for 8 s at micro.py:" in failure["error"]
    assert "the workflow of episode" in failure["error"]
    assert "rollout-0 died with exit code 1" in output(run)


IGNORES = "while True:\n    try:\n        await asyncio.sleep(3600)\n    except asyncio.CancelledError:\n        pass"


@pytest.mark.parametrize("hang", ["await asyncio.sleep(3600)", IGNORES], ids=["waits", "ignores"])
def test_a_workflow_that_never_returns(
    environment: dict[str, str], write_recipe: Callable[..., Path], tmp_path: Path, hang: str
) -> None:
    """It ends by its time limit on a worker that goes on living, whether it lets itself be cancelled or not."""
    run = tmp_path / "run"
    recipe = write_recipe(once(hang, tmp_path / "hung"))
    # On-policy: no batch can do without the group that hangs.
    on_policy = ("--set", f"steps={STEPS}", "policies.main.max_staleness=0")
    more = (*on_policy, "limits.time_limit_s=5", "rollout.cancel_grace_s=1")
    with started(environment, recipe, run, *more) as process:
        assert process.wait(timeout=DEADLINE_S) == 0, output(run)[-3000:]
    check_ended(run, steps=STEPS)
    (failure,) = failures_of(run)
    assert failure["failure"] == "timeout"
    assert "the workflow did not return within 5 s" in failure["error"]
    assert "died" not in output(run)


def test_a_workflow_that_always_blocks_ends_the_run_and_the_ledger_has_the_cause(
    environment: dict[str, str], write_recipe: Callable[..., Path], cli: Cli, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    recipe = write_recipe(f"import time\n    time.sleep(3600)\n    {GOOD}")
    more = ("--set", f"steps={STEPS}", "rollout.block_limit_s=3", "limits.first_failures=100")
    with started(environment, recipe, run, *more) as process:
        assert process.wait(timeout=DEADLINE_S) == 1, output(run)[-3000:]
    for verb in ("status", "doctor"):
        said = cli(verb, run)
        assert said.returncode == 1, said.stdout
        assert "rollout-0 died 3 times in a row" in said.stdout, "the ledger knows what the launcher knew"
        assert "blocked the event loop for 3 s at micro.py:" in said.stdout


@pytest.mark.parametrize("victim", ["rollout", "trainer", "dataflow"])
def test_a_process_that_is_stopped_for_good_is_named_and_replaced(
    environment: dict[str, str], write_recipe: Callable[..., Path], tmp_path: Path, victim: str
) -> None:
    """SIGSTOP without end: it lives, holds its sockets, and says nothing."""
    run = tmp_path / "run"
    more = ("--set", "steps=150", "limits.hung_after_s=4", "limits.dead_after_s=5", "limits.lease_ttl_s=5")
    with started(environment, write_recipe(), run, *more) as process:
        wait_for("the tenth step", lambda: version_of(run) >= 10)
        (pid,) = [pid for pid, verb in processes_of(run).items() if verb == victim]
        os.kill(pid, signal.SIGSTOP)
        assert process.wait(timeout=DEADLINE_S) == 0, output(run)[-3000:]
    name = {"rollout": "rollout-0", "trainer": "trainer-main", "dataflow": "dataflow"}[victim]
    assert f"{name} is ended: is not heard of for" in output(run)
    assert f"{name} died with signal SIGKILL" in output(run)
    check_ended(run, steps=150)
