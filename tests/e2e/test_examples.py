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
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = ("solver", "verifier")
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
    warm_up = int(re.findall(r"^WARM_UP_STEPS = (\d+)", (EXAMPLES / "tiny.py").read_text(), re.MULTILINE)[0])
    assert score[max(score)] - score[warm_up] >= 0.2, "what reinforcement adds to the supervised steps"


def test_two_policies_are_trained_together(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    summary = finish(start("two_policies.py", folder), folder, within_s=600)
    assert (summary["ledger_difference"], (folder / "curve.png").exists()) == (0, True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    score = {line["policy_version"]: line["metrics"]["score"] for line in lines if line["kind"] == "eval"}
    assert score[max(score)] - score[100] >= 0.2, "what reinforcement adds to the supervised steps"
    steps = [line for line in lines if line["kind"] == "step" and "reward/train" in line["metrics"]]
    rewards = {name: [line["metrics"]["reward/train"] for line in steps if line["policy"] == name] for name in NAMES}
    first, last = (sum(part) / len(part) for part in (rewards["solver"][:10], rewards["solver"][-10:]))
    assert last - first >= 0.15, f"the solver has not learned: {first:.2f} to {last:.2f}"
    assert len(rewards["verifier"]) >= 50, "the verifier has its own steps and its own curve"
