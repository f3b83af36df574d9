"""Each workflow of several agents from its first step to its last, on a tiny model: two policies, both trained."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from astraflow.run.cli import main

RECIPE = """
import random
from astraflow.rollout.settings import RolloutSettings, TreeLimits
from astraflow.run.recipe import Policy, Recipe
from astraflow.run.tiny_model import TinyModel
from astraflow.tasks.generated import GeneratedTasks
from astraflow.trainer.settings import TrainerSettings
from astraflow.types import Sampling, Task
from astraflow.workflows.{module} import {name}

MODEL = TinyModel(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64, context=128, characters="01 ?\\n")


def make(index: int) -> Task:
    return Task(key=str(index), payload={{"prompt": bin(random.Random(index).randrange(64))[2:]}})


def short(text: str, task: Task) -> float:
    return float(len(text) == 1)  # a character and no control token: half of what an untrained model says


def policy() -> Policy:
    return Policy(model=MODEL, groups_per_batch=2, trainer=TrainerSettings(lr=1e-4, dtype="float32"))


def recipe() -> Recipe:
    first, *others = {roles}
    return Recipe(
        name="{module}",
        policies={{"a": policy(), "b": policy()}} if others else {{"a": policy()}},
        roles={{first: "a", **dict.fromkeys(others, "b")}},
        workflow={name}(short, {settings}),
        tasks=GeneratedTasks("bits", make),
        sampling=Sampling(max_tokens=2, stop_token_ids=tuple(range(12))),  # any token ends a reply
        rollout=RolloutSettings(slots=16, tree=TreeLimits(agents=12, depth=2, children=2)),
        group_size=8,
        steps=2,
    )
"""

CHECKING = 'words=("0", "1"), check="{question} {answer}?", again="{critique}?"'
SEVEN = {
    "solve_and_verify": ("SolveAndVerify", ("solver", "verifier"), CHECKING + ", rounds=3"),
    "solve_verify_retry": ("SolveVerifyRetry", ("solver", "verifier"), CHECKING),
    "solve_and_select": (
        "SolveAndSelect",
        ("solver", "selector"),
        'words=("0", "1"), select="{question} {one} {two}?"',
    ),
    "plan_and_solve": ("PlanAndSolve", ("planner", "solver"), 'plan="{question}", solve="{question} {plan}?"'),
    "debate": ("Debate", ("debater",), 'debaters=3, others="{others}?"'),
    "small_large_router": ("SmallLargeRouter", ("router", "small", "large"), 'words=("0", "1"), route="{question}?"'),
    "spawn": ("Spawn", ("root", "worker"), 'mark="1", split="{question}?", join="{answers}?", alone="?"'),
}


@pytest.mark.slow
@pytest.mark.parametrize("module", SEVEN)
def test_a_workflow_is_trained_end_to_end(
    module: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, roles, settings = SEVEN[module]
    monkeypatch.setenv("ASTRAFLOW_CACHE", str(cache))
    path, run = tmp_path / f"{module}.py", tmp_path / "run"
    path.write_text(RECIPE.format(module=module, name=name, roles=roles, settings=settings))
    assert main(["run", str(path), "--run-dir", str(run), "--in-process"]) == 0
    assert json.loads((run / "summary.json").read_text())["ledger_difference"] == 0
    db = sqlite3.connect(run / "run.db")
    try:
        committed = db.execute(
            "SELECT policy, COUNT(*) FROM batches WHERE state = 'committed' GROUP BY policy"
        ).fetchall()
        agents = {agent for (agent,) in db.execute("SELECT DISTINCT agent FROM samples").fetchall()}
        failed = db.execute("SELECT COUNT(*) FROM events WHERE kind = 'failed'").fetchone()
    finally:
        db.close()
    assert committed == [("a", 2), ("b", 2)][: min(2, len(roles))]
    assert {agent.partition("#")[0] for agent in agents} == set(roles)
    assert failed == (0,)
