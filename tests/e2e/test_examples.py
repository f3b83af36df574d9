"""The examples as a user runs them: real model, real processes, `kill -9` of each, a balanced ledger at the end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from astraflow.run.held_out_roles import held_out_by_role
from astraflow.run.layout import RunFolder
from astraflow.run.run_db import open_run_db

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WARM_UP_STEPS = re.compile(r"^WARM_UP_STEPS = (\d+)", re.MULTILINE)
pytestmark = pytest.mark.slow


def start(recipe: str, folder: Path, *settings: str) -> subprocess.Popen[bytes]:
    sets = [part for setting in settings for part in ("--set", setting)]
    command = [
        sys.executable,
        "-m",
        "astraflow.run.cli",
        "run",
        str(EXAMPLES / recipe),
        "--run-dir",
        str(folder),
        *sets,
    ]
    with (folder.parent / "output").open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)


def finish(run: subprocess.Popen[bytes], folder: Path, *, within_s: float) -> dict[str, Any]:
    """The summary of a run that ended well, its ledger checked once more from the file."""
    try:
        code = run.wait(within_s)
    finally:
        run.kill()
        run.wait()
    assert code == 0, (folder.parent / "output").read_text()[-4000:]
    ledger = subprocess.run(
        [sys.executable, "-m", "astraflow.run.cli", "ledger", str(folder), "--json"], capture_output=True, check=True
    )
    assert json.loads(ledger.stdout)["difference"] == 0
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def children(pid: int) -> dict[str, int]:
    """Role → pid of the launcher's children."""
    found: dict[str, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            command = (stat.parent / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):  # ended while we looked
            continue
        if parent == pid:
            found |= {
                role: int(stat.parent.name) for role in ("dataflow", "rollout", "trainer") if role.encode() in command
            }
    return found


def until_step(run: subprocess.Popen[bytes], folder: Path, step: int, *, within_s: float) -> None:
    """Until the run has committed ``step`` versions."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and run.poll() is None:
        said = subprocess.run(
            [sys.executable, "-m", "astraflow.run.cli", "status", str(folder), "--json"], capture_output=True
        )
        if said.returncode == 0 and json.loads(said.stdout)["policies"][0]["version"] >= step:
            return
    pytest.fail(f"step {step} not reached: {(folder.parent / 'output').read_text()[-4000:]}")


@pytest.mark.parametrize("victim", ["rollout", "trainer", "dataflow"])
def test_guarantee_quickstart_survives_kill_9(tmp_path: Path, victim: str) -> None:
    folder = tmp_path / "run"
    small = (
        "steps=3",
        "policies.main.groups_per_batch=1",
        "policies.main.trainer.checkpoint_every=1",
        "eval.count=16",
    )
    run = start("quickstart.py", folder, *small)
    until_step(run, folder, 1, within_s=400)
    os.kill(children(run.pid)[victim], signal.SIGKILL)
    summary = finish(run, folder, within_s=400)
    assert summary["steps"] == 3
    assert summary["ledger_difference"] == 0


def test_tiny_learns(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    summary = finish(start("tiny.py", folder), folder, within_s=600)
    assert summary["ledger_difference"] == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    score = {line["policy_version"]: line["metrics"]["score"] for line in lines if line["kind"] == "eval"}
    warm_up = WARM_UP_STEPS.search((EXAMPLES / "tiny.py").read_text())
    assert warm_up is not None
    assert score[max(score)] - score[int(warm_up[1])] >= 0.2, "what reinforcement adds to the supervised steps"


def test_two_policies_both_learn(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    summary = finish(start("two_policies.py", folder), folder, within_s=600)
    assert (summary["ledger_difference"], (folder / "curve.png").exists()) == (0, True)
    said = (tmp_path / "output").read_text()
    assert all(name in said for name in ("reward solver", "reward verifier", "held-out verifier"))
    run = RunFolder(folder)
    with open_run_db(run.database) as db:
        held_out = {role: dict(points) for role, points in held_out_by_role(db, run.payloads).items()}
        steps = [step for step in db.steps() if step.metrics.get("staleness/mean") is not None]
    assert {role: len(points) >= 3 for role, points in held_out.items()} == {"solver": True, "verifier": True}
    rewards = {
        role: [step.reward for step in steps if step.policy == role and step.reward is not None]
        for role in ("solver", "verifier")
    }
    assert min(map(len, rewards.values())) >= 50, "each has steps and a curve of its own"
    first = {role: mean(each[:10]) for role, each in rewards.items()}
    last = {role: mean(each[-10:]) for role, each in rewards.items()}
    assert last["solver"] - first["solver"] >= 0.1, (first, last)
    assert last["verifier"] - first["verifier"] >= 0.05, (first, last)
    assert last["verifier"] > max(last["solver"], 1 - last["solver"]), "better than the same verdict on everything"
