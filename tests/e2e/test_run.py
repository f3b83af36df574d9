"""Real processes, real sockets: a run from its first line to its last."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from astraflow.observe.metrics_file import read_points, series
from tests.e2e.conftest import Cli

FOLDER = {
    "run.db",
    "config.json",
    "tokens.json",
    "metrics.jsonl",
    "trace.jsonl",
    "weights",
    "checkpoints",
    "logs",
    "payloads",
    "summary.json",
    "curve.png",
}


def check_ended(run: Path, *, steps: int) -> None:
    """What every finished run promises, whatever was killed on its way."""
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == steps
    assert summary["ledger_difference"] == 0
    assert set(summary) == {"steps", "accuracy_before", "accuracy_after", "rl_wall_s", "wall_s", "ledger_difference"}
    with sqlite3.connect(run / "run.db") as db:
        committed = db.execute("SELECT version FROM batches WHERE state = 'committed' ORDER BY version").fetchall()
        assert [version for (version,) in committed] == list(range(steps))
        assert db.execute("SELECT value FROM meta WHERE key = 'state'").fetchone() == ("finished",)
        evals = dict(db.execute("SELECT version, state FROM evals").fetchall())
        assert set(evals.values()) == {"done"}
        assert {0, steps} <= set(evals)
    db.close()
    shown = series(read_points(run / "metrics.jsonl"), "step", "step/trained_tokens")
    assert [step for step, _ in shown] == list(range(1, steps + 1))


def test_in_process(cli: Cli, write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = cli("run", write_recipe(), "--run-dir", run, "--in-process", "--json", "--set", "steps=3")
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["steps"] == 3
    check_ended(run, steps=3)
    assert {path.name for path in run.iterdir()} >= FOLDER


@pytest.mark.slow
def test_three_processes_and_every_verb(cli: Cli, write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    recipe, run = write_recipe(), tmp_path / "run"
    done = cli("run", recipe, "--run-dir", run, "--set", "steps=5", "eval.every=2")
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    for words in ("step 5/5", "held-out accuracy", "balances", "models export", "before:", "estimate"):
        assert words in done.stdout
    check_ended(run, steps=5)
    assert {path.name for path in run.iterdir()} >= FOLDER
    assert (run / "tokens.json").stat().st_mode & 0o777 == 0o600
    assert {path.name for path in (run / "logs").iterdir()} == {"dataflow.log", "rollout-0.log", "trainer-main.log"}

    points = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sorted(point["step"] for point in points if point["kind"] == "step") == [1, 2, 3, 4, 5]
    assert sorted(point["policy_version"] for point in points if point["kind"] == "eval") == [0, 2, 4, 5]
    kinds = {json.loads(line)["kind"] for line in (run / "trace.jsonl").read_text().splitlines()}
    assert {"admitted", "leased", "done", "kept", "cut", "committed"} <= kinds

    ledger = cli("ledger", run, "--json")
    assert (ledger.returncode, json.loads(ledger.stdout)["difference"]) == (0, 0)
    with sqlite3.connect(run / "run.db") as db:
        (group,) = db.execute("SELECT MAX(id) FROM groups WHERE purpose = 'train'").fetchone()
    db.close()
    journey = cli("trace", run, f"{group}/0", "--json")
    assert [event["kind"] for event in json.loads(journey.stdout)["events"]][:2] == ["admitted", "leased"]
    assert "admitted" in cli("trace", run, f"{group}/0").stdout
    status = cli("status", run)
    assert (status.returncode, status.stderr) == (0, "")
    assert f"{run} has finished" in status.stdout

    folder = tmp_path / "exported"
    assert cli("models", "export", run, folder).returncode == 0
    again = cli("models", "export", run, folder)
    assert (again.returncode, "not empty" in again.stderr) == (2, True)
    score = cli("eval", recipe, "--model", folder, "--json")
    assert json.loads(score.stdout)["score"] == json.loads((run / "summary.json").read_text())["accuracy_after"]

    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(folder).config.num_hidden_layers == 1
    assert AutoTokenizer.from_pretrained(folder).decode(AutoTokenizer.from_pretrained(folder)("12").input_ids) == "12"


@pytest.mark.slow
def test_f69_a_folder_of_another_run_is_never_picked_up(
    cli: Cli, write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    recipe, run = write_recipe(), tmp_path / "run"
    assert cli("run", recipe, "--run-dir", run, "--in-process", "--set", "steps=2").returncode == 0
    again = cli("run", recipe, "--run-dir", run, "--in-process")
    assert again.returncode == 2
    assert "already holds a run" in again.stderr
    write_recipe(change=("lr=1e-4", "lr=2e-4"))
    changed = cli("resume", run, "--in-process")
    assert changed.returncode == 2
    assert "policies.main.trainer.lr: 0.0001 → 0.0002" in changed.stderr
    write_recipe("return Reward(1.0)")
    other_code = cli("resume", run, "--in-process")
    assert other_code.returncode == 2
    assert "other sources of the recipe" in other_code.stderr
    write_recipe()
    resumed = cli("resume", run, "--in-process")
    assert resumed.returncode == 0, resumed.stderr
    check_ended(run, steps=2)
