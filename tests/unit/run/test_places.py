"""Recipes of several policies: who is served where, who ends when, and what schedule stands for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from astraflow.algorithms.curate import Shuffled, Stage, Stages
from astraflow.algorithms.pace import AllHaveRoom, BoundedStaleness
from astraflow.algorithms.pace_rounds import Barrier, Sync
from astraflow.algorithms.pipeline import Pipeline
from astraflow.errors import ConfigError
from astraflow.rollout.endpoint import engine_token
from astraflow.run.checks import check_recipe
from astraflow.run.config import to_plain
from astraflow.run.plan import plan_lines, plan_of
from astraflow.run.recipe import Policy, Recipe, default_pipeline
from astraflow.run.serve_rollout import Serves
from astraflow.run.supervisor import place_flags
from astraflow.run.tiny_model import TinyModel
from astraflow.tasks.lists import ListTasks
from astraflow.types import Task
from astraflow.wire.tokens import ENVIRONMENT

MODEL = TinyModel()


def three(**fields: Any) -> dict[str, Any]:
    policies = {
        "large": Policy(model=MODEL, groups_per_batch=10),
        "small": Policy(model=MODEL, groups_per_batch=2, steps=50),
        "judge": Policy(model=MODEL, trainable=False),
    }
    return {"policies": policies, "roles": {"a": "large", "b": "small", "c": "judge"}, **fields}


PLACES = (("large",), ("small", "judge"))


def test_a_recipe_of_several_places_is_right(recipe_with: Callable[..., Recipe]) -> None:
    check_recipe(recipe_with(**three(services=2, places=PLACES)))
    check_recipe(recipe_with(**three(services=4, places=PLACES)))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"services": 2, "places": (("large",), ("smal", "judge"))}, "places names 'smal', not in Recipe.policies"),
        ({"services": 2, "places": (("large",), ("small",))}, "policy 'judge' of Recipe.policies is in no place"),
        ({"services": 1, "places": PLACES}, "2 places and Recipe.services is 1: set services to at least 2"),
        ({"services": 3, "places": (*PLACES, ())}, "holds a place without policies"),
    ],
)
def test_places_that_cannot_be_are_refused(
    recipe_with: Callable[..., Recipe], fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_recipe(recipe_with(**three(**fields)))


def test_the_launcher_gives_places_in_turn() -> None:
    assert place_flags((), 3) == ()
    assert place_flags(PLACES, 0) == place_flags(PLACES, 2) == ("--policies", "large", "--policy-port", "0")
    assert place_flags(PLACES, 1)[1] == "small,judge"


def test_what_a_worker_serves(recipe_with: Callable[..., Recipe]) -> None:
    recipe = recipe_with(**three())
    assert Serves().own(recipe) == ("large", "small", "judge")
    assert Serves(policies=("small",)).own(recipe) == ("small",)
    with pytest.raises(ConfigError, match=r"--policies names 'x'; Recipe.policies has large, small, judge"):
        Serves(policies=("x",)).own(recipe)
    assert Serves().endpoint({}, None) is None  # type: ignore[arg-type]


def test_f96_the_engine_s_port_is_not_opened_by_the_worker_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "a-token-of-a-worker")
    endpoint = Serves(port=0).endpoint({}, None)  # type: ignore[arg-type]
    assert endpoint is not None and endpoint._token == engine_token("a-token-of-a-worker") != "a-token-of-a-worker"


@pytest.mark.parametrize(("schedule", "pace"), [("async", BoundedStaleness), ("barrier", Barrier), ("sync", Sync)])
def test_a_schedule_is_a_pace_in_the_place_of_the_pipeline_s(
    recipe_with: Callable[..., Recipe], schedule: str, pace: type
) -> None:
    for pipeline in (None, default_pipeline, default_pipeline(recipe_with())):
        made = recipe_with(schedule=schedule, pipeline=pipeline).with_pipeline().pipeline
        assert isinstance(made, Pipeline) and isinstance(made.pace, pace)


def test_async_leaves_the_pipeline_as_it_is(recipe_with: Callable[..., Recipe]) -> None:
    def own(recipe: Recipe) -> Pipeline:
        made = default_pipeline(recipe)
        return Pipeline(curate=made.curate, pace=AllHaveRoom(), credit=made.credit, select=made.select)

    made = recipe_with(pipeline=own).with_pipeline().pipeline
    assert isinstance(made, Pipeline) and made.pace == AllHaveRoom()


def test_schedules_have_names_and_are_part_of_the_config(recipe_with: Callable[..., Recipe]) -> None:
    with pytest.raises(ConfigError, match=r"schedule must be one of async, barrier, sync, found 'synchronous'"):
        recipe_with(schedule="synchronous")
    digests = {str(to_plain(recipe_with(schedule=name).with_pipeline())) for name in ("async", "barrier", "sync")}
    assert len(digests) == 3


def test_every_policy_may_end_at_its_own_step(recipe_with: Callable[..., Recipe]) -> None:
    recipe = recipe_with(**three(steps=10))
    assert [recipe.steps_of(name) for name in recipe.trainable] == [10, 50]


@pytest.mark.parametrize(("name", "value"), [("steps", -1), ("keep_every", -1)])
def test_settings_of_a_policy_out_of_range_are_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"Policy.{name} must be at least 0, found -1"):
        Policy(model=MODEL, **{name: value})


def test_the_plan_tells_what_each_policy_does(recipe_with: Callable[..., Recipe]) -> None:
    class Found:
        recipe = recipe_with(**three(steps=10, group_size=4)).with_pipeline()
        digest = "d" * 64

    plan = plan_of(Found())  # type: ignore[arg-type]
    assert plan["episodes_in_all"] == max(10 * 10, 2 * 50) * 4
    text = "\n".join(plan_lines(plan))
    assert "policy large: trained, " in text and "10 steps of 40 samples" in text
    assert "50 steps of 8 samples" in text
    assert "policy judge: frozen, " in text and "it plays and is not trained" in text


def test_the_plan_counts_a_supervised_group_as_one_episode(recipe_with: Callable[..., Recipe]) -> None:
    """As ``Stages`` of 12 rows and then reinforcement: 5 steps of 4 groups are 12 x 1 + 8 x 6 episodes."""
    rows = ListTasks("rows", [Task(key=str(n), workflow="supervised", payload={"policy": "main"}) for n in range(7)])
    played = ListTasks("played", [Task(key=str(n)) for n in range(7)])

    def stages(recipe: Recipe) -> Pipeline:
        warm_up = Stage(curate=Shuffled(rows, group_size=recipe.group_size), groups=12)
        rest = Stage(curate=Shuffled(played, group_size=recipe.group_size))
        return dataclasses.replace(default_pipeline(recipe), curate=Stages([warm_up, rest]))

    class Found:
        digest = "d" * 64

        def __init__(self, pipeline: Any) -> None:
            policies = {"main": Policy(model=MODEL, groups_per_batch=4)}
            self.recipe = recipe_with(policies=policies, steps=5, group_size=6, pipeline=pipeline).with_pipeline()

    found = Found(stages)
    before = found.recipe.pipeline.curate.state_dict()  # type: ignore[union-attr]
    plan = plan_of(found)  # type: ignore[arg-type]
    assert (plan["supervised_groups"], plan["episodes_in_all"]) == (12, 12 * 1 + 8 * 6)
    assert found.recipe.pipeline.curate.state_dict() == before, "a plan takes no task"  # type: ignore[union-attr]
    first, *others = plan_lines(plan)
    assert "5 steps of 24 episodes (groups of 6; 12 groups are supervised rows of one episode), 60 episodes" in first
    assert any("5 steps of 24 samples (4 where all are supervised rows)" in line for line in others)
    two = {name: Policy(model=MODEL, groups_per_batch=4) for name in ("main", "other")}
    found.recipe = dataclasses.replace(found.recipe, policies=two, roles={"a": "main", "b": "other"})
    assert plan_of(found)["episodes_in_all"] == 12 + 20 * 6, "no row teaches the other"  # type: ignore[arg-type]
    plain = plan_of(Found(None))  # type: ignore[arg-type]
    assert (plain["supervised_groups"], plain["episodes_in_all"]) == (0, 5 * 4 * 6)
    assert "supervised" not in "\n".join(plan_lines(plain))


@pytest.mark.parametrize("function", [str.strip, len, "x".join, dict.fromkeys])
def test_built_in_functions_are_settings_too(function: Any) -> None:
    assert str(to_plain(function)).startswith("builtins:")
