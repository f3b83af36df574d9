"""Many runs of a tiny model in one process: real parts, and ages that are exactly what was asked for."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from astraflow.algorithms.credit import GroupMean
from astraflow.algorithms.curate import Shuffled
from astraflow.algorithms.keep import DropZeroVariance
from astraflow.algorithms.pace import BoundedStaleness
from astraflow.algorithms.pace_held import HeldStaleness
from astraflow.algorithms.pipeline import Pipeline
from astraflow.algorithms.select import EarliestDeadline, Fifo
from astraflow.errors import RunFailed
from astraflow.run.bench._drive import Aged, Drive, Found, Plan
from astraflow.run.bench._middle import HELD_OUT, digits, middle, pool, split, started
from astraflow.tasks.base import TaskSource
from astraflow.tasks.lists import ListTasks
from astraflow.trainer.settings import TrainerSettings
from astraflow.types import Lease, Task

STEPS, GROUPS, SIZE = 7, 2, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    made = started(folder, seed=0, steps=12)
    assert started(folder, seed=0, steps=12) == made, "made once"
    return made


def few() -> TaskSource:
    unseen = split().held_out
    return ListTasks("few", [unseen.task(n) for n in range(6)])


def plan(model: Path, **changed: object) -> Plan:
    pipeline = Pipeline(
        curate=Shuffled(split().train, group_size=SIZE),
        pace=HeldStaleness(lag=3),
        credit=GroupMean(std=True),
        keep=(DropZeroVariance(),),
        select=EarliestDeadline(),
    )
    plain = Plan(
        model=model,
        pipeline=pipeline,
        trainer=TrainerSettings(lr=1e-3, dtype="float32", threads=1),
        steps=STEPS,
        groups_per_batch=GROUPS,
        max_staleness=3,
        seed=0,
        held_out=few(),
        eval_every=3,
    )
    return replace(plain, **changed)  # type: ignore[arg-type]


def driven(plan: Plan, folder: Path) -> Found:
    return asyncio.run(Drive(plan, folder).run())


def with_pace(plan: Plan, pace: object, **changed: object) -> Plan:
    return replace(plan, pipeline=replace(plan.pipeline, pace=pace, **changed))  # type: ignore[arg-type]


def test_guarantee_what_is_trained_is_exactly_so_old_by_the_ledger(model: Path, tmp_path: Path) -> None:
    found = driven(plan(model), tmp_path)
    ages = [min(3, version) for version in range(STEPS)]
    assert found.ages == tuple(Aged(version=n, youngest=age, oldest=age) for n, age in enumerate(ages))
    assert found.ended == ""
    assert found.groups["trained"] == STEPS * GROUPS
    assert "stale" not in found.groups
    assert not found.masked
    assert [point.version for point in found.points] == [0, 3, 6, 7], "also of the last one"
    assert found.points[-1].episodes == SIZE * sum(found.groups.values()), "what is evaluated is not counted"
    assert {point.at_s for point in found.points} == {0.0}


def test_the_engine_samples_with_the_version_of_its_time(model: Path, tmp_path: Path) -> None:
    """Held or not, the first step is the same; then other weights sample, and the runs part."""
    fresh = driven(with_pace(plan(model, steps=3, eval_every=1), HeldStaleness(lag=0)), tmp_path / "fresh")
    assert [each.oldest for each in fresh.ages] == [0, 0, 0]
    held = driven(plan(model, steps=3, eval_every=1), tmp_path / "held")
    assert [each.oldest for each in held.ages] == [0, 1, 2]
    assert fresh.trained[:GROUPS] == held.trained[:GROUPS], "of the same weights, seed and tasks"


def test_time_passes_by_episodes_and_steps_alone_and_who_is_late_goes_stale(model: Path, tmp_path: Path) -> None:
    """Every fourth group takes longer than the bound allows: others overtake it, and it is played no further."""

    def episode_s(lease: Lease) -> float:
        return 45.0 if lease.group % 4 == 0 else 1.0

    slow = with_pace(plan(model, steps=5, max_staleness=1), BoundedStaleness(), select=Fifo())
    found = driven(replace(slow, episode_s=episode_s, step_s=10.0), tmp_path)
    assert found.ended == ""
    assert found.groups["stale"] > 0
    assert found.cancelled > 0
    assert found.cancelled % SIZE == 0, "whole groups"
    assert max(each.oldest for each in found.ages) <= 1
    assert found.points[-1].at_s >= 5 * 10.0 + 1.0


def test_what_ends_a_run_is_in_its_row_and_not_the_end_of_the_table(model: Path, tmp_path: Path) -> None:
    class Never(BoundedStaleness):
        def may_admit(self, rooms: object) -> bool:
            return False

    found = driven(with_pace(plan(model), Never()), tmp_path)
    assert found.ended.startswith("RunFailed: nothing is under way and nothing can begin: ")
    assert [point.version for point in found.points] == [0]
    assert issubclass(RunFailed, Exception)


def test_the_task_is_split_and_every_held_out_one_is_unseen() -> None:
    train, unseen = split()
    keys = {train.task(n).key for n in range(train.size or 0)}
    out = {unseen.task(n).key for n in range(unseen.size or 0)}
    assert (len(keys), len(out)) == (720 - HELD_OUT, HELD_OUT)
    assert not keys & out
    few_train = pool().train
    assert {few_train.task(n).key for n in range(few_train.size or 0)} < keys
    assert digits(Task(key="7 0 3")) == [7, 0, 3]


@pytest.mark.parametrize(("said", "reward"), [("3", 1.0), ("7", 0.0), ("3 ", 0.0), ("", 0.0)])
def test_only_the_middle_digit_alone_is_right(said: str, reward: float) -> None:
    class Seat:
        async def chat(self, messages: object) -> object:
            return type("Reply", (), {"text": said})()

    given = asyncio.run(middle(Task(key="7 0 3"), {"main": Seat()}))  # type: ignore[arg-type]
    assert given.episode == reward
