"""Runs of seconds in this process: the real dataflow, engine and trainer on a model of a few thousand parameters."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import Any

from astraflow.algorithms.pipeline import Pipeline
from astraflow.errors import AstraFlowError
from astraflow.observe.metrics_file import read_points, series
from astraflow.rollout.settings import RolloutSettings
from astraflow.rollout.workflow import Agents, Reward
from astraflow.run.checks import check_recipe
from astraflow.run.config import Resolved, to_plain
from astraflow.run.first_cause import first_cause_only
from astraflow.run.in_process import run_in_process
from astraflow.run.layout import RunFolder
from astraflow.run.prepare import create_run
from astraflow.run.recipe import Policy, Recipe, default_pipeline
from astraflow.run.tiny_model import TinyModel
from astraflow.tasks.generated import GeneratedTasks
from astraflow.trainer.settings import TrainerSettings
from astraflow.types import Sampling, Task

MODEL = TinyModel(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64, context=32, characters="0123456789")
SMALL = frozenset("01234")


async def small_digits(task: Task, agents: Agents) -> Reward:
    """The share of the reply that is a digit below five: about a third by chance."""
    reply = await agents["main"].chat([{"role": "user", "content": task.key}])
    return Reward(sum(each in SMALL for each in reply.text) / max(1, len(reply.tokens)))


def recipe(
    trainer: TrainerSettings, *, staleness: int = 2, pipeline: dict[str, Any] | None = None, **more: Any
) -> Recipe:
    """``pipeline``: what is to be other than GRPO's."""
    made = Recipe(
        name="micro",
        policies={"main": Policy(model=MODEL, groups_per_batch=2, max_staleness=staleness, trainer=trainer)},
        **{
            "workflow": small_digits,
            "tasks": GeneratedTasks("digits", lambda index: Task(key=str(index % 1000))),
            "sampling": Sampling(max_tokens=4),
            "rollout": RolloutSettings(slots=32),
            "group_size": 8,
            "steps": 3,
            **more,
        },
    )
    chosen: Pipeline = dataclasses.replace(default_pipeline(made), **(pipeline or {}))
    return dataclasses.replace(made, pipeline=chosen)


def play(made: Recipe, folder: Path, *, check: bool = True) -> RunFolder:
    """The folder of a run that has ended, by failing too. Without ``check``: also what no recipe may say."""
    made = made.with_pipeline()
    if check:
        check_recipe(made)
    resolved = Resolved(
        recipe=made, reference="", overrides=(), seed=None, config=to_plain(made), digest="micro", code_digest=""
    )
    run = create_run(resolved, folder)
    with suppress(AstraFlowError), first_cause_only():
        asyncio.run(run_in_process(run, resolved, watch=lambda _: None))
    return run


def metric(run: RunFolder, name: str) -> list[float]:
    """By step."""
    return [value for _, value in series(read_points(run.path / "metrics.jsonl"), "step", name)]
