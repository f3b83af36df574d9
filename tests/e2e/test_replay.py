"""``astraflow replay`` on the ledger of a real run: model, engine, trainer and all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from astraflow.algorithms.curate import Mixture, Shuffled
from astraflow.run.cli import main
from astraflow.run.layout import RunFolder
from astraflow.run.replay.report import replay, report_lines
from astraflow.run.run_db import open_run_db
from astraflow.tasks.base import TaskSource
from astraflow.tasks.lists import ListTasks
from astraflow.types import Task
from tests.e2e.conftest import GOOD, RECIPE


def elsewhere(tasks: TaskSource, group_size: int) -> Mixture:
    """Half of the run's own tasks, half that it never played."""
    others = ListTasks("others", [Task(key=str(n)) for n in range(9)])
    return Mixture([Shuffled(each, group_size=group_size) for each in (tasks, others)], weights=[1, 1])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunFolder]:
    folder = tmp_path_factory.mktemp("replayed")
    recipe = folder / "replayed_run.py"
    recipe.write_text(RECIPE.format(body=GOOD))
    before = os.environ.get("ASTRAFLOW_CACHE")
    os.environ["ASTRAFLOW_CACHE"] = str(folder / "models")
    try:
        where = str(folder / "run")
        assert main(["run", str(recipe), "--run-dir", where, "--in-process", "--set", "steps=5", "eval.every=2"]) == 0
        yield RunFolder(folder / "run")
    finally:
        os.environ.pop("ASTRAFLOW_CACHE")
        if before is not None:
            os.environ["ASTRAFLOW_CACHE"] = before


def test_its_own_algorithms_decide_again_exactly_as_recorded(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(run.path), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["own"]["same"] and found["own"]["differences"] == [] and found["own"]["batches"] >= 5
    then, now = found["policies"]["main"]["happened"], found["policies"]["main"]["replayed"]["least"]
    assert then == now and then["steps"] == 5
    with open_run_db(run.database) as db:
        ask = db.connection.execute
        groups, episodes = ask("SELECT COUNT(*), SUM(size) FROM groups WHERE purpose = 'train'").fetchone()
        (age,) = ask("SELECT AVG(age) FROM samples WHERE state = 'trained'").fetchone()
        dropped = dict(ask("SELECT reason, COUNT(*) FROM group_policy WHERE state = 'dropped' GROUP BY 1").fetchall())
    assert (then["groups"], then["episodes"], then["dropped"]) == (groups, episodes, dropped)
    assert then["staleness"] == pytest.approx(age)


def test_the_ledger_of_a_real_run_is_verified_with_what_its_algorithms_know(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ledger", str(run.path), "--verify", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["differences"] == [] and found["decisions"] >= 5
    assert not [why for why in found["not_compared"] if "algorithms" in why]


def test_other_algorithms_side_by_side(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run.path), "--keep", "none", "--select", "Fifo(window=9)"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("its own algorithms decide again as recorded: ")
    assert "with keep=none, select=Fifo: " in out
    for row in ("main", "steps", "groups opened", "episodes of them", "groups kept", "groups with signal", "staleness"):
        assert f"\n{row}" in out
    assert "never made" not in out, "the same tasks in the same order were all made"


def test_tasks_that_were_never_played_bound_the_answer(run: RunFolder) -> None:
    found = replay(run, curate="tests.e2e.test_replay:elsewhere")
    passes = found["policies"]["main"]["replayed"]
    unmade = found["never_made"]
    assert unmade["groups"] > 0 and unmade["episodes"] == 4 * unmade["groups"]
    assert passes["least"]["steps"] <= passes["most"]["steps"]
    assert passes["least"]["dropped"]["never_made"] == unmade["groups"]
    lines = report_lines(found)
    assert any(line.startswith(f"never made: {unmade['groups']} of the {unmade['of']} groups") for line in lines)
    assert found["own"]["same"]


def test_wrong_names_are_named(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run.path), "--curate", "Gresso"]) == 2
    assert "did you mean Greso?" in capsys.readouterr().err
    assert main(["replay", str(run.path), "--curate", "Greso"]) == 2
    assert "needs a task source of a known size" in capsys.readouterr().err, "this run's tasks are unbounded"
    assert main(["replay", str(tmp_path)]) == 2
