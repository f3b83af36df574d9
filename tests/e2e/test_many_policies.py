"""Several policies as real processes: each with its own trainer, none waiting for another, some frozen."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Cli

RECIPE = """
import random
import zlib
from astraflow.rollout.settings import RolloutSettings
from astraflow.rollout.workflow import Agents, Reward
from astraflow.run.recipe import Eval, Policy, Recipe
from astraflow.run.tiny_model import TinyModel
from astraflow.tasks.generated import GeneratedTasks
from astraflow.tasks.held_out import held_out
from astraflow.trainer.settings import TrainerSettings
from astraflow.types import Sampling, Task

MODEL = TinyModel(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64, context=64, characters="0123456789 ")
ONE = Sampling(max_tokens=2, stop_token_ids=tuple(range(18)))  # any token ends a reply


def make(index: int) -> Task:
    return Task(key=str(random.Random(f"many/{index}").randrange(1000)))


def coin(*what: object) -> float:
    return float(zlib.crc32(repr(what).encode()) % 2)


def policy(**fields: object) -> Policy:
    lr = fields.pop("lr", 1e-4)
    return Policy(model=MODEL, trainer=TrainerSettings(lr=lr, dtype="float32", checkpoint_every=2), **fields)


def settings(**fields: object) -> Recipe:
    split = held_out(GeneratedTasks("digits", make), count=8)
    return Recipe(name="many", tasks=split.train, eval=Eval(tasks=split.held_out, count=8), sampling=ONE,
                  rollout=RolloutSettings(slots=16), group_size=4, **fields)
"""

THREE = """

async def three(task: Task, agents: Agents) -> Reward:
    answer = await agents["solver"].chat([{"role": "user", "content": task.key}])
    seen = await agents["verifier"].chat([{"role": "user", "content": f"{task.key} {answer.text}"}])
    await agents["referee"].chat([{"role": "user", "content": f"{task.key} {seen.text}"}])
    return Reward(solver=coin(task.key, answer.tokens), verifier=coin(seen.tokens, task.key), referee=None)


def recipe() -> Recipe:
    policies = {
        "large": policy(groups_per_batch=5, max_staleness=1, lr=1e-4),
        "small": policy(groups_per_batch=1, max_staleness=3, lr=3e-4, steps=20),
        "judge": policy(trainable=False),
    }
    roles = {"solver": "large", "verifier": "small", "referee": "judge"}
    return settings(policies=policies, roles=roles, workflow=three, steps=4)
"""

EIGHT = """

async def chain(task: Task, agents: Agents) -> Reward:
    said, rewards = task.key, {}
    for number in range(8):
        reply = await agents[f"p{number}"].chat([{"role": "user", "content": said}])
        said = f"{task.key} {reply.text}"
        rewards[f"p{number}"] = coin(number, task.key, reply.tokens)
    return Reward(**rewards)


def recipe() -> Recipe:
    return settings(policies={f"p{n}": policy(groups_per_batch=1 + n % 3) for n in range(8)}, workflow=chain, steps=2)
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def written(body: str) -> Path:
        path = tmp_path / "many.py"
        path.write_text(RECIPE + body)
        return path

    return written


def rows(run: Path, sql: str) -> list[tuple[Any, ...]]:
    db = sqlite3.connect(run / "run.db")
    try:
        return db.execute(sql).fetchall()
    finally:
        db.close()


def check_balances(run: Path) -> None:
    assert json.loads((run / "summary.json").read_text())["ledger_difference"] == 0


@pytest.mark.slow
def test_two_trained_policies_at_1_to_5_steps_and_a_frozen_one(
    cli: Cli, write: Callable[[str], Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = cli("run", write(THREE), "--run-dir", run, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    check_balances(run)
    steps = dict(rows(run, "SELECT policy, COUNT(*) FROM batches WHERE state = 'committed' GROUP BY policy"))
    assert steps == {"large": 4, "small": 20}
    assert "policy judge: frozen" in done.stdout and "20 steps of 4 samples" in done.stdout
    groups = rows(
        run,
        "SELECT g.batch, COUNT(*) FROM batch_groups g JOIN batches b ON b.id = g.batch "
        "WHERE b.policy = 'large' AND b.state = 'committed' GROUP BY g.batch",
    )
    assert [count for _, count in groups] == [5] * 4
    ages = dict(rows(run, "SELECT policy, MAX(age) FROM samples WHERE state = 'trained' GROUP BY policy"))
    assert ages["large"] <= 1 and ages["small"] <= 3
    assert not rows(run, "SELECT 1 FROM samples WHERE policy = 'judge' AND state = 'trained'")
    assert not rows(run, "SELECT 1 FROM group_policy WHERE policy = 'judge'")
    assert {path.name for path in (run / "logs").iterdir()} == {
        "dataflow.log",
        "rollout-0.log",
        "trainer-large.log",
        "trainer-small.log",
    }
    trace = json.loads(cli("trace", run, f"{_newest_group(run)}/0", "--json").stdout)
    if trace["episode"] is not None:
        found = {each["role"]: (each["policy"], len(each["turns"])) for each in trace["episode"]["trajectories"]}
        assert found == {"solver": ("large", 1), "verifier": ("small", 1), "referee": ("judge", 1)}


def _newest_group(run: Path) -> int:
    return int(rows(run, "SELECT MAX(id) FROM groups WHERE purpose = 'train' AND state = 'closed'")[0][0])


@pytest.mark.slow
def test_eight_policies_in_one_workflow_need_no_special_case(
    cli: Cli, write: Callable[[str], Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = cli("run", write(EIGHT), "--run-dir", run, "--in-process", timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    check_balances(run)
    steps = dict(rows(run, "SELECT policy, COUNT(*) FROM batches WHERE state = 'committed' GROUP BY policy"))
    assert steps == {f"p{number}": 2 for number in range(8)}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["sync", "barrier"])
def test_schedules_for_comparison_are_one_setting(
    cli: Cli, write: Callable[[str], Path], tmp_path: Path, schedule: str
) -> None:
    """Nobody begins a step before the other has ended the one before; under sync nothing is admitted meanwhile."""
    run = tmp_path / "run"
    sets = (f"schedule={schedule}", "steps=6", "policies.small.steps=6")
    done = cli("run", write(THREE), "--run-dir", run, "--in-process", "--set", *sets, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    check_balances(run)
    at = {"large": 0, "small": 0}
    training: set[str] = set()
    for kind, policy in rows(
        run,
        "SELECT kind, policy FROM events WHERE kind IN ('cut', 'committed') "
        "OR (kind = 'admitted' AND json_extract(data, '$.purpose') = 'train') ORDER BY id",
    ):
        if kind == "cut":
            assert at[policy] == min(at.values()), f"{policy} begins step {at[policy] + 1} at {at}"
            training.add(policy)
        elif kind == "committed":
            at[policy] += 1
            training.discard(policy)
        elif schedule == "sync":
            assert not training, f"a group was admitted while {training} trained"
    assert at == {"large": 6, "small": 6}


@pytest.mark.slow
def test_a_policy_is_frozen_and_another_swapped_while_the_run_goes_on(
    cli: Cli, write: Callable[[str], Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    recipe = write(THREE)
    ended: dict[str, subprocess.CompletedProcess[str]] = {}

    def play() -> None:
        sets = ("steps=90", "policies.small.steps=180", "policies.small.keep_every=3")
        ended["run"] = cli("run", recipe, "--run-dir", run, "--set", *sets, timeout=400)

    thread = threading.Thread(target=play)
    thread.start()
    try:
        _until(lambda: _version(cli, run, "small") >= 6, thread)
        frozen = cli("freeze", run, "small")
        swapped = cli("swap", run, "judge", "--source", "small", "--version", "3")
        refused = cli("swap", run, "large", "--source", "small", "--version", "3")
    finally:
        thread.join(400)
    assert (frozen.returncode, swapped.returncode) == (0, 0), frozen.stderr + swapped.stderr
    assert refused.returncode == 2 and "large is trained in this run" in refused.stderr
    assert ended["run"].returncode == 0, ended["run"].stderr[-3000:]
    check_balances(run)
    steps = dict(rows(run, "SELECT policy, COUNT(*) FROM batches WHERE state = 'committed' GROUP BY policy"))
    assert steps["large"] == 90 and 6 <= steps["small"] < 180
    (digest,) = rows(run, "SELECT digest FROM publications WHERE policy = 'small' AND version = 3")[0]
    assert rows(run, "SELECT version, digest FROM publications WHERE policy = 'judge' ORDER BY serial")[1] == (
        1,
        digest,
    )
    late = cli("freeze", run, "large")
    assert late.returncode == 2 and "a run that goes on" in late.stderr


@pytest.mark.slow
def test_each_service_serves_some_policies_and_asks_the_other_for_the_rest(
    cli: Cli, write: Callable[[str], Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    recipe = write(THREE.replace("steps=4)", 'steps=4, services=2, places=(("large",), ("small", "judge")))'))
    done = cli("run", recipe, "--run-dir", run, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    check_balances(run)
    steps = dict(rows(run, "SELECT policy, COUNT(*) FROM batches WHERE state = 'committed' GROUP BY policy"))
    assert steps == {"large": 4, "small": 20}
    served = dict(rows(run, "SELECT name, policies FROM components WHERE component = 'rollout'"))
    assert set(served) == {"rollout-0", "rollout-1"}
    players = {worker for (worker,) in rows(run, "SELECT DISTINCT worker FROM episodes WHERE state = 'done'")}
    assert players, "nobody played"
    assert all(set(served[worker].split(",")) == {"large", "small", "judge"} for worker in players)


@pytest.mark.slow
def test_in_one_process_each_place_is_a_service_that_asks_the_others(
    cli: Cli, write: Callable[[str], Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    recipe = write(THREE.replace("steps=4)", 'steps=2, services=2, places=(("large",), ("small", "judge")))'))
    done = cli("run", recipe, "--run-dir", run, "--in-process", "--set", "policies.small.steps=4", timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    check_balances(run)
    assert {name for (name,) in rows(run, "SELECT name FROM components WHERE component = 'rollout'")} == {
        "rollout-0",
        "rollout-1",
    }
    played = rows(run, "SELECT DISTINCT policies FROM components WHERE component = 'rollout'")
    assert played == [("judge,large,small",)], "what it does not serve it asks for"


def _version(cli: Cli, run: Path, policy: str) -> int:
    said = cli("status", run, "--json")
    found = json.loads(said.stdout) if said.returncode == 0 else {}
    return next((each["version"] for each in found.get("policies", ()) if each["policy"] == policy), 0)


def _until(true: Callable[[], bool], while_alive: threading.Thread) -> None:
    deadline = time.monotonic() + 300
    while not true():
        assert while_alive.is_alive() and time.monotonic() < deadline, "the run ended before it was far enough"
        time.sleep(0.2)
