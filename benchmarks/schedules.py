"""What is learned under each schedule: the default, ``barrier`` and ``sync``, equal batches and steps, several seeds.

The solver and the verifier of ``examples/two_policies.py``, warmed up once for all; then each run reinforces both from
there, on real models, with a grader that takes its time (log-normal, p99 / p50 = 8, seeded), so that the schedules
train data of different age. Each run has a process and one torch thread. Prints one line of JSON a run as it ends, and
one with the table.

    python -m benchmarks.schedules --seeds 5
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import multiprocessing
import random
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from examples import two_policies

from astraflow.rewards.exact import Exact
from astraflow.rollout.loop_guard import PLAYING
from astraflow.rollout.settings import RolloutSettings
from astraflow.run.config import Resolved, resolve
from astraflow.run.export import export_version
from astraflow.run.finish import finish_run
from astraflow.run.in_process import run_in_process
from astraflow.run.layout import RunFolder
from astraflow.run.prepare import create_run
from astraflow.run.recipe import Eval, Recipe
from astraflow.run.run_db import open_run_db
from astraflow.types import Task
from astraflow.workflows.solve_and_verify import SolveAndVerify

SCHEDULES = ("async", "barrier", "sync")
STEPS, HELD_OUT = 72, 60
TOOL_S, SIGMA = 0.1, math.log(8) / 2.326
LATELY = 8
"""Steps at the end over which a reward is averaged."""


async def slow_grade(text: str, task: Task) -> float:
    draw = random.Random(f"tool/{task.key}/{PLAYING.get()}")
    await asyncio.sleep(TOOL_S * math.exp(draw.gauss(0.0, SIGMA)))
    return Exact()(text, task)


def warm_up() -> Recipe:
    return dataclasses.replace(two_policies.recipe(), eval=None, steps=two_policies.WARM_UP_STEPS)


def reinforced() -> Recipe:
    """From models that ``--set policies.NAME.model`` names."""
    base = two_policies.recipe()
    return dataclasses.replace(
        base,
        name="schedules",
        workflow=SolveAndVerify(slow_grade, words=("y", "n"), check=two_policies.CHECK),
        pipeline=None,
        eval=Eval(tasks=base.eval.tasks, count=HELD_OUT) if base.eval else None,
        rollout=RolloutSettings(slots=192),
        steps=STEPS,
    )


def played(recipe: str, changes: tuple[str, ...], seed: int, folder: Path) -> tuple[RunFolder, Resolved]:
    torch.set_num_threads(1)
    resolved = resolve(recipe, changes, seed)
    run = create_run(resolved, folder)
    asyncio.run(run_in_process(run, resolved, watch=lambda _: None))
    return run, resolved


def warmed_models(folder: Path) -> tuple[str, ...]:
    """Changes that name both models after the warm-up, which is the same for every schedule and seed."""
    run, resolved = played("benchmarks.schedules:warm_up", (), 0, folder / "warm-up")
    recipe = resolved.recipe
    for name in recipe.policies:
        export_version(run, recipe, policy=name, version=None, target=folder / name)
    return tuple(f"policies.{name}.model={folder / name}" for name in recipe.policies)


def learned(job: tuple[str, int, tuple[str, ...]]) -> dict[str, Any]:
    schedule, seed, changes = job
    with tempfile.TemporaryDirectory(prefix=f"schedules-{schedule}-{seed}-") as folder:
        run, resolved = played(
            "benchmarks.schedules:reinforced", (*changes, f"schedule={schedule}"), seed, Path(folder) / "run"
        )
        summary = finish_run(run, resolved, wall_s=None).summary
        with open_run_db(run.database) as db:
            tokens = dict(
                db.connection.execute(
                    "SELECT policy, SUM(tokens) FROM samples WHERE state = 'trained' GROUP BY policy"
                ).fetchall()
            )
            age = db.connection.execute("SELECT AVG(age) FROM samples WHERE state = 'trained'").fetchone()[0]
            verdicts = [step.reward for step in db.steps() if step.policy == "verifier" and step.reward is not None]
    return {
        "schedule": schedule,
        "seed": seed,
        "before": summary["accuracy_before"],
        "accuracy": summary["accuracy_after"],
        "verifier": round(mean(verdicts[-LATELY:]), 3),
        "rl_wall_s": summary["rl_wall_s"],
        "trained_tokens": tokens,
        "age": round(age, 2),
        "ledger_difference": summary["ledger_difference"],
    }


def measure(seeds: int, at_once: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="schedules-") as folder:
        changes = warmed_models(Path(folder))
        jobs = [(schedule, seed, changes) for seed in range(seeds) for schedule in SCHEDULES]
        runs = []
        with ProcessPoolExecutor(at_once, mp_context=multiprocessing.get_context("spawn")) as pool:
            for run in pool.map(learned, jobs):
                print(json.dumps(run), flush=True)
                runs.append(run)
    return {"steps": STEPS, "schedules": {name: _spread(runs, name) for name in SCHEDULES}}


def _spread(runs: list[dict[str, Any]], schedule: str) -> dict[str, Any]:
    own = [run for run in runs if run["schedule"] == schedule]
    found: dict[str, Any] = {}
    for name in ("accuracy", "verifier", "rl_wall_s", "age"):
        values = [run[name] for run in own]
        found[name] = {"mean": round(mean(values), 3), "deviation": round(stdev(values), 3) if len(own) > 1 else None}
    return {**found, "trained_tokens": [sum(run["trained_tokens"].values()) for run in own]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=2)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.seeds, arguments.at_once)))


if __name__ == "__main__":
    main()
