"""Contradictions are found before anything starts (F98), settings have one place (F99)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from astraflow.algorithms.base import Curate
from astraflow.algorithms.credit import GroupMean, PerTask, Returns, Whitened
from astraflow.algorithms.credit_agents import PerAgent, StateGroups
from astraflow.algorithms.credit_shapes import Shaped, TurnDiscount
from astraflow.algorithms.curate import Mixture, Shuffled, Stage, Stages, WithOlderVersions, most_groups
from astraflow.algorithms.keep import DropNoAdvantage, DropTruncated, DropZeroVariance
from astraflow.algorithms.pace import BoundedStaleness
from astraflow.algorithms.pipeline import Pipeline
from astraflow.algorithms.select import EarliestDeadline
from astraflow.algorithms.select_replay import WithReplay
from astraflow.dataflow.settings import Limits
from astraflow.engines.settings import EngineSettings
from astraflow.errors import ConfigError
from astraflow.rollout.settings import RolloutSettings
from astraflow.rollout.workflow import Reward
from astraflow.run.checks import check_recipe
from astraflow.run.recipe import Eval, Policy, Recipe, default_pipeline
from astraflow.run.tiny_model import TinyModel
from astraflow.tasks.lists import ListTasks
from astraflow.trainer.settings import LossSettings, TrainerSettings
from astraflow.types import Sampling, Task

Build = Callable[..., Recipe]
TINY = TinyModel(context=64)


async def workflow(task: Any, agents: Any) -> Any: ...


def refused(recipe: Recipe) -> str:
    with pytest.raises(ConfigError) as caught:
        check_recipe(recipe.with_pipeline())
    return str(caught.value)


def finite(curate: Curate) -> Pipeline:
    return Pipeline(curate=curate, pace=BoundedStaleness(), credit=Returns(), keep=(), select=EarliestDeadline())


def test_f98_tasks_that_cannot_last_for_every_step(recipe_with: Build) -> None:
    """A dataset that is smaller than a batch comes round again; a number of epochs that is too small is refused."""
    rows = ListTasks("rows", [Task(key=str(i)) for i in range(3)])

    def pipeline(epochs: int | None) -> Pipeline:
        return finite(Shuffled(rows, group_size=8, epochs=epochs))

    check_recipe(recipe_with(tasks=rows, steps=10, pipeline=pipeline(None)))
    check_recipe(recipe_with(tasks=rows, steps=3, pipeline=pipeline(8)))
    words = refused(recipe_with(tasks=rows, steps=3, pipeline=pipeline(7)))
    for part in ("Recipe.steps 3", "groups_per_batch 8 need 24 groups", "gives only 21", "raise its epochs"):
        assert part in words
    check_recipe(recipe_with(tasks=rows, steps=0, pipeline=pipeline(1)))


def test_how_many_groups_a_supply_can_give() -> None:
    rows = ListTasks("rows", [Task(key=str(i)) for i in range(3)])
    twice, ever = Shuffled(rows, group_size=2, epochs=2), Shuffled(rows, group_size=2)
    assert (most_groups(twice), most_groups(ever)) == (6, None)
    assert most_groups(Stages([Stage(curate=ever, groups=4), Stage(curate=twice)])) == 10
    assert most_groups(Stages([Stage(curate=twice, groups=99), Stage(curate=twice, groups=1)])) == 7
    assert most_groups(Stages([Stage(curate=twice), Stage(curate=ever)])) is None
    assert most_groups(Mixture([twice, twice], weights=[1, 3])) == 12
    assert most_groups(Mixture([twice, ever], weights=[1, 3])) is None
    given = 0
    while twice.next() is not None:
        given += 1
    assert given == 6


def test_a_sound_recipe_passes(recipe_with: Build) -> None:
    check_recipe(recipe_with().with_pipeline())


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"group_size": 1}, ("group_size", "pipeline.credit", "use")),
        ({"limits": Limits(min_group=9)}, ("limits.min_group", "group_size", "lower")),
        (
            {"sampling": Sampling(max_tokens=64), "policies": {"main": Policy(model=TINY)}},
            ("max_tokens", "max_context"),
        ),
        (
            {"policies": {"main": Policy(model=TINY, engine=EngineSettings(max_context=65, versions_held=2))}},
            ("engine.max_context", "64 tokens"),
        ),
        ({"sampling": Sampling(temperature=0.0)}, ("sampling.temperature", "steps")),
        ({"sampling": Sampling(top_p=0.9)}, ("top_p", "allow_truncated_sampling")),
        ({"sampling": Sampling(top_k=5)}, ("top_k", "allow_truncated_sampling")),
        (
            {"policies": {"main": Policy(model=TINY, trainer=TrainerSettings(schedule="linear", warmup_steps=10))}},
            ("warmup_steps", "steps"),
        ),
        ({"roles": {"solver": "nobody"}}, ("roles['solver']", "policies")),
        (
            {"roles": {"solver": "main"}, "policies": {"main": Policy(model=TINY), "idle": Policy(model=TINY)}},
            ("'idle'", "roles"),
        ),
        ({"policies": {"main": Policy(model=TINY, trainable=False)}}, ("steps", "trainable")),
        ({"workflow": lambda task, agents: None}, ("workflow", "async")),
        (
            {"policies": {"main": Policy(model="/nowhere/model")}},
            ("policies['main'].model", "/nowhere/model", "models get"),
        ),
    ],
)
def test_f98_contradictions_name_both_settings(
    recipe_with: Build, changes: dict[str, Any], keys: tuple[str, ...]
) -> None:
    began = time.perf_counter()
    words = refused(recipe_with(**changes))
    assert time.perf_counter() - began < 1.0
    for key in keys:
        assert key in words
    assert "\n" not in words


def test_f98_what_is_off_is_not_checked(recipe_with: Build) -> None:
    """A run without steps only evaluates: training's contradictions do not matter."""
    check_recipe(recipe_with(steps=0, sampling=Sampling(temperature=0.0, max_tokens=8), group_size=1).with_pipeline())
    own = Pipeline(
        curate=Shuffled(recipe_with().tasks, group_size=1),
        pace=BoundedStaleness(),
        credit=Returns(),
        select=EarliestDeadline(),
    )
    check_recipe(recipe_with(group_size=1, pipeline=own).with_pipeline())
    check_recipe(recipe_with(sampling=Sampling(top_p=0.9), allow_truncated_sampling=True).with_pipeline())


def test_f98_evaluation(recipe_with: Build) -> None:
    recipe = recipe_with()
    assert recipe.eval is not None
    held = recipe.eval.tasks
    assert "eval.count is 11" in refused(recipe_with(eval=Eval(tasks=held, count=11)))
    assert "would be trained" in refused(recipe_with(eval=Eval(tasks=recipe.tasks, count=5), tasks=recipe.tasks))
    assert "eval.episodes is 4" in refused(recipe_with(eval=Eval(tasks=held, count=5, episodes=4)))
    check_recipe(
        recipe_with(eval=Eval(tasks=held, count=5, episodes=4, sampling=Sampling(max_tokens=8))).with_pipeline()
    )


def test_what_is_never_trained_is_not_what_a_training_run_evaluates(recipe_with: Build) -> None:
    evaluation = recipe_with().eval
    assert evaluation is not None
    policies = {"main": Policy(model=TINY), "old": Policy(model=TINY, trainable=False)}
    judged = recipe_with(policies=policies, eval=replace(evaluation, policy="old"))
    assert "Recipe.eval.policy is 'old', which has trainable=False: only its version 0" in refused(judged)
    check_recipe(replace(judged, steps=0).with_pipeline())
    averaged = {**policies, "old": Policy(model=TINY, trainable=False, average_of="main")}
    check_recipe(replace(judged, policies=averaged).with_pipeline())


@pytest.mark.parametrize("name", ["../s", "a/b", "", "con", "x" * 129])
def test_a_policy_is_called_what_a_file_may_be_called(recipe_with: Build, name: str) -> None:
    words = refused(recipe_with(policies={name: Policy(model=TINY)}, roles={"main": name}))
    assert words.startswith("a name in Recipe.policies must match [A-Za-z0-9._-]{1,128}") and name[:40] in words


@pytest.mark.parametrize("role", ["turns", "baseline_keys", "features"])
def test_no_role_is_called_as_an_argument_of_a_reward(recipe_with: Build, role: str) -> None:
    expected = f"role {role!r} cannot be rewarded: Reward({role}=...) means something else"
    assert expected in refused(recipe_with(roles={role: "main"}))
    assert expected in refused(recipe_with(policies={role: Policy(model=TINY)})), "it plays the role of its name"


def test_what_else_a_role_may_be_called_can_be_rewarded(recipe_with: Build) -> None:
    for role in ("self", "episode", "two words"):
        assert Reward(**{role: 1.0}).roles == {role: 1.0}
        check_recipe(recipe_with(roles={role: "main"}).with_pipeline())
    assert "has a role whose name is empty" in refused(recipe_with(roles={"": "main"}))


def test_no_sampling_is_set_for_a_role_that_there_is_not(recipe_with: Build) -> None:
    rollout = RolloutSettings(role_sampling={"nobody": Sampling(temperature=0.5)})
    words = refused(recipe_with(rollout=rollout, roles={"solver": "main"}))
    assert words == "Recipe.rollout.role_sampling names 'nobody', which is no role (solver)"
    known = RolloutSettings(role_sampling={"solver": Sampling(temperature=0.5)})
    check_recipe(recipe_with(rollout=known, roles={"solver": "main"}).with_pipeline())


def test_f99_sampling_has_one_place(recipe_with: Build) -> None:
    other = RolloutSettings(sampling=Sampling(temperature=0.7))
    assert "rollout.sampling and Recipe.sampling" in refused(recipe_with(rollout=other))
    greedy = RolloutSettings(eval_sampling=Sampling(temperature=0.0))
    assert "Recipe.eval.sampling" in refused(recipe_with(rollout=greedy))
    trainer = Policy(model=TINY, trainer=TrainerSettings(temperature=0.7))
    words = refused(recipe_with(policies={"main": trainer}))
    assert "trainer.temperature is 0.7" in words
    assert "sampling.temperature 1.0" in words


def test_f99_everybody_reads_that_one_place(recipe_with: Build) -> None:
    sampling = Sampling(max_tokens=8, temperature=0.7, stop=("\n",))
    settings = recipe_with(sampling=sampling).rollout_settings()
    assert settings.sampling == sampling
    assert settings.eval_sampling == Sampling(max_tokens=8, temperature=0.0, stop=("\n",))


@pytest.mark.parametrize(
    "bad",
    [
        {"group_size": 0},
        {"steps": -1},
        {"seed": -1},
        {"services": -1},
        {"name": "a/b"},
        {"policies": {}},
    ],
)
def test_ranges(recipe_with: Build, bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"found|empty"):
        recipe_with(**bad)


@pytest.mark.parametrize("place", ["select", "curate"])
def test_f98_older_samples_are_of_no_use_where_none_may_be_trained(recipe_with: Build, place: str) -> None:
    rows = ListTasks("rows", [Task(key=str(i)) for i in range(3)])
    plain = finite(Shuffled(rows, group_size=8))
    parts: dict[str, Any] = {
        "select": WithReplay(EarliestDeadline(), ratio=0.3),
        "curate": WithOlderVersions(plain.curate, chance=0.5),
    }
    older = replace(plain, **{place: parts[place]})

    def recipe(bound: int, pipeline: Pipeline, **more: Any) -> Recipe:
        policies = {"main": Policy(model=TINY, max_staleness=bound)}
        return recipe_with(tasks=rows, pipeline=pipeline, policies=policies, **more)

    words = refused(recipe(0, older))
    assert f"Recipe.pipeline.{place} is {type(parts[place]).__name__} and max_staleness 0: what an older" in words
    for fine in (recipe(1, older), recipe(0, plain), recipe(0, older, steps=0)):
        check_recipe(fine.with_pipeline())


@pytest.mark.parametrize("bad", [{"max_staleness": -1}, {"groups_per_batch": 0}])
def test_ranges_of_a_policy(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="found"):
        Policy(model=TINY, **bad)


def test_a_model_folder_that_lacks_a_part_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"lacks tokenizer.json, \*\.safetensors"):
        Policy(model=tmp_path).folder()


def test_f37_advantages_are_not_normalised_twice(recipe_with: Build) -> None:
    loss = LossSettings(name="reinforce_plus_plus")
    policies = {"main": Policy(model=TINY, trainer=TrainerSettings(loss=loss))}
    hidden = Shaped(shapes=(TurnDiscount(gamma=0.9),), credit=GroupMean())
    for credit in (GroupMean(), Whitened(credit=Returns()), PerTask(credit=Returns()), hidden):
        pipeline = replace(default_pipeline(recipe_with()), credit=credit)
        words = refused(recipe_with(policies=policies, pipeline=pipeline))
        assert "trainer.loss.name is 'reinforce_plus_plus'" in words and "GroupMean(std=False) or Returns()" in words
        check_recipe(recipe_with(pipeline=pipeline))
    for credit in (GroupMean(std=False), Returns()):
        check_recipe(recipe_with(policies=policies, pipeline=replace(default_pipeline(recipe_with()), credit=credit)))


@pytest.mark.parametrize(("name", "more"), [("dr_grpo", {"constant": 8.0}), ("rloo", {}), ("kimi", {})])
def test_f38_a_loss_of_differences_takes_none_that_were_divided(
    recipe_with: Build, name: str, more: dict[str, float]
) -> None:
    """Dr. GRPO with a deviation is not Dr. GRPO."""
    loss = LossSettings(name=name, **more)  # type: ignore[arg-type]
    policies = {"main": Policy(model=TINY, trainer=TrainerSettings(loss=loss))}
    hidden = Shaped(shapes=(TurnDiscount(gamma=0.9),), credit=GroupMean())
    for credit in (GroupMean(), PerAgent(), StateGroups(), Whitened(credit=GroupMean(std=False)), hidden):
        words = refused(
            recipe_with(policies=policies, pipeline=replace(default_pipeline(recipe_with()), credit=credit))
        )
        assert f"trainer.loss.name is '{name}'" in words and "divides them by their deviation: use GroupMean" in words
    for credit in (GroupMean(std=False), GroupMean(std=False, leave_one_out=True), Returns(), PerAgent(std=False)):
        check_recipe(recipe_with(policies=policies, pipeline=replace(default_pipeline(recipe_with()), credit=credit)))


@pytest.mark.parametrize("loss", [{"name": "vapo"}, {"name": "ppo", "options": {"value_coefficient": 0.5}}])
def test_a_critic_wants_rewards_of_every_group(recipe_with: Build, loss: dict[str, Any]) -> None:
    policies = {"main": Policy(model=TINY, trainer=TrainerSettings(loss=LossSettings(**loss)))}
    plain = replace(default_pipeline(recipe_with()), credit=Returns(), keep=())
    check_recipe(recipe_with(policies=policies, pipeline=plain))
    check_recipe(recipe_with(policies=policies, pipeline=replace(plain, keep=(DropTruncated(),))))
    hidden = Shaped(shapes=(TurnDiscount(gamma=0.9),), credit=GroupMean(std=False))
    for credit in (GroupMean(), Whitened(credit=Returns()), hidden):
        words = refused(recipe_with(policies=policies, pipeline=replace(plain, credit=credit)))
        assert "with a critic, which wants rewards" in words and "use Returns()" in words
    for keep in (DropZeroVariance(), DropNoAdvantage()):
        words = refused(recipe_with(policies=policies, pipeline=replace(plain, keep=(keep,))))
        assert f"keep has {type(keep).__name__}" in words and "leave it out" in words
