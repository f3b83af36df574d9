"""The benchmark of what is learned under each schedule: one setting differs, and its slow grader is seeded."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
from benchmarks.schedules import SCHEDULES, TOOL_S, _spread, reinforced, slow_grade, warm_up

from astraflow.algorithms.pace import BoundedStaleness
from astraflow.algorithms.pace_rounds import Barrier, Sync
from astraflow.algorithms.pipeline import Pipeline
from astraflow.rollout.loop_guard import PLAYING
from astraflow.testing.virtual_loop import run_virtual
from astraflow.types import Task


def took_s(episode: str) -> float:
    async def graded() -> float:
        PLAYING.set(episode)
        assert await slow_grade("7", Task(key="3 7 5", payload={"answer": 7})) == 1.0
        assert await slow_grade("3", Task(key="3 7 5", payload={"answer": 7})) == 0.0
        return asyncio.get_running_loop().time() / 2

    return run_virtual(graded)


def test_the_grader_is_right_slow_and_seeded_by_the_episode() -> None:
    assert took_s("1/0/1") == took_s("1/0/1") != took_s("1/1/1")
    times = [took_s(f"{group}/0/1") for group in range(400)]
    assert float(np.median(times)) == pytest.approx(TOOL_S, rel=0.2)
    assert 3 < float(np.quantile(times, 0.99)) / TOOL_S < 16, "p99 / p50 = 8"


def test_schedules_differ_in_their_pace_alone() -> None:
    made = {name: dataclasses.replace(reinforced(), schedule=name).with_pipeline() for name in SCHEDULES}
    pipelines = {name: recipe.pipeline for name, recipe in made.items()}
    assert all(isinstance(each, Pipeline) for each in pipelines.values())
    paces = {name: type(each.pace) for name, each in pipelines.items() if isinstance(each, Pipeline)}
    assert paces == {"async": BoundedStaleness, "barrier": Barrier, "sync": Sync}
    assert len({(recipe.steps, recipe.group_size, recipe.seed) for recipe in made.values()}) == 1
    assert made["sync"].policies == made["async"].policies
    assert warm_up().eval is None and warm_up().steps > 0


def test_the_spread_is_over_the_seeds_of_one_schedule() -> None:
    def run(schedule: str, accuracy: float) -> dict[str, object]:
        numbers = {"accuracy": accuracy, "verifier": 0.5, "rl_wall_s": 10.0, "age": 1.0}
        return {"schedule": schedule, **numbers, "trained_tokens": {"solver": 3, "verifier": 4}}

    found = _spread([run("sync", 0.5), run("async", 0.9), run("sync", 0.7)], "sync")
    assert found["accuracy"] == {"mean": 0.6, "deviation": pytest.approx(0.141)}
    assert found["trained_tokens"] == [7, 7]
    assert _spread([run("sync", 0.5)], "sync")["accuracy"] == {"mean": 0.5, "deviation": None}
