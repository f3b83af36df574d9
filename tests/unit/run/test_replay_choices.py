"""Algorithms by name on the command line: AstraFlow's, anyone's, with options; and what is said of wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from astraflow.algorithms.base import ReadyGroup
from astraflow.algorithms.curate import Greso, Less, Shuffled
from astraflow.algorithms.keep import DropTruncated, DropZeroVariance
from astraflow.algorithms.pipeline import Pipeline
from astraflow.algorithms.select import EarliestDeadline, Fifo
from astraflow.algorithms.select_replay import WithReplay
from astraflow.errors import ConfigError
from astraflow.run.recipe import Recipe
from astraflow.run.replay.choices import algorithm, chosen, known
from astraflow.tasks.lists import ListTasks
from astraflow.types import Task

HERE = __name__
MADE = Fifo(window=3)


class Mine:
    """A Select of somebody's."""

    def __init__(self, recipe: Recipe, step: int = 2) -> None:
        self.recipe = recipe
        self.step = step

    def pick(self, ready: Any, *, need: int, oldest_open: int | None) -> list[int]:
        return []


def made_of(tasks: Any, group_size: int) -> Shuffled:
    return Shuffled(tasks, group_size=group_size + 1)


def broken() -> Any:
    raise RuntimeError("no luck")


@pytest.fixture
def recipe(recipe_with: Callable[..., Recipe]) -> Recipe:
    rows = ListTasks("rows", [Task(key=str(i)) for i in range(5)])
    return recipe_with(tasks=rows, group_size=3, seed=7).with_pipeline()


def test_names_of_astraflow_get_what_they_ask_for_of_the_run(recipe: Recipe) -> None:
    greso = algorithm("curate", "Greso", recipe)
    assert isinstance(greso, Greso) and greso.next().episodes == 3
    assert greso.state_dict()["seed"] == 7 and greso.state_dict()["tasks"] == recipe.tasks.digest()


def test_options_are_plain_values(recipe: Recipe) -> None:
    greso = algorithm("curate", " Greso(p_easy=0.3, reward_range=(-1, 1), seed = 2) ", recipe)
    assert greso.p_easy == 0.3 and greso.state_dict()["seed"] == 2
    assert algorithm("select", "Fifo(window=9)", recipe) == Fifo(window=9)
    again = algorithm("select", "WithReplay(ratio='0.29')", recipe)
    assert isinstance(again, WithReplay), "the select beside it is the run's own"
    assert again.share([], policy="p", need=100) == 0 and Fraction("0.29") * 100 == 29


@pytest.mark.parametrize("text", ["WithReplay(ratio=0.5)", "WithSupervised(share=0.5)"])
def test_of_a_run_that_replays_the_choice_of_fresh_groups_is_taken(recipe: Recipe, text: str) -> None:
    assert isinstance(recipe.pipeline, Pipeline)
    again = WithReplay(Fifo(window=7), ratio=0.3)
    made = algorithm("select", text, replace(recipe, pipeline=replace(recipe.pipeline, select=again)))
    ready = [ReadyGroup(group=group, min_version=0, arrival=group) for group in (1, 8)]
    assert made.pick(ready, need=2, oldest_open=1) == [], "8 is outside the window of the run's own Fifo"
    assert made.pick(ready, need=2, oldest_open=2) == [1, 8]


def test_anyones_by_module_and_name(recipe: Recipe) -> None:
    assert algorithm("select", f"{HERE}:MADE", recipe) is MADE
    mine = algorithm("select", f"{HERE}:Mine(step=5)", recipe)
    assert mine.recipe is recipe and mine.step == 5
    assert algorithm("curate", f"{HERE}:made_of", recipe).next().episodes == 4
    assert algorithm("select", f"{HERE}:Mine", recipe).step == 2


def test_what_is_chosen_replaces_that_alone(recipe: Recipe) -> None:
    assert chosen(recipe, curate=None, keep=[], select=None) == {}
    assert chosen(recipe, curate=None, keep=["none"], select=None) == {"keep": ()}
    found = chosen(recipe, curate="Shuffled", keep=["DropTruncated", "DropZeroVariance"], select="EarliestDeadline")
    assert found["keep"] == (DropTruncated(), DropZeroVariance()) and found["select"] == EarliestDeadline()
    assert isinstance(found["curate"], Shuffled)


def test_known_are_all_that_answer_the_question() -> None:
    assert {"Greso", "Dots", "Prioritised", "FilterSolved", "Less", "Shuffled", "Uniform"} <= set(known("curate"))
    assert {"DropZeroVariance", "DropTruncated"} <= set(known("keep")) and "Greso" not in known("keep")
    assert {"Fifo", "EarliestDeadline", "WithReplay"} <= set(known("select"))
    assert known("curate")["Less"] is Less and "Curate" not in known("curate")


@pytest.mark.parametrize(
    ("question", "text", "message"),
    [
        ("curate", "Gresso", "--curate Gresso: AstraFlow has none of this name; did you mean Greso?"),
        ("select", "qqqq", "there are EarliestDeadline, Fifo"),
        ("select", "qqqq", r"WithSupervised\. Others are package\.module:object$"),
        ("curate", "Fifo", "AstraFlow has none of this name"),
        ("curate", "nowhere.at_all:X", "cannot be imported"),
        ("select", f"{HERE}:Missing", "cannot be imported"),
        ("curate", "Greso(p=0.3)", r"there is no option 'p'; known: tasks, group_size, seed"),
        ("curate", "Greso(0.3)", "options are name=value with plain Python values"),
        ("curate", "Greso(p_easy=open('x'))", "options are name=value with plain Python values"),
        ("curate", "Greso(**{'p_easy': 0.3})", "options are name=value with plain Python values"),
        ("curate", "Greso(p_easy=0.3)(seed=2)", "options are name=value with plain Python values"),
        ("curate", "Greso(p_easy=", "must be a name"),
        ("curate", "Greso(p_easy=2)", r"Greso.p_easy must be in \[0, 1\], found 2"),
        ("curate", "Mixture(weights=[1])", r"--curate Mixture\(weights=\[1\]\) needs parts"),
        ("select", f"{HERE}:broken", "raised RuntimeError: no luck"),
        ("curate", f"{HERE}:MADE", "Fifo is no Curate"),
        ("keep", f"{HERE}:made_of", "Shuffled is no Keep"),
        ("select", "", "must be a name"),
    ],
)
def test_wrong_ones(recipe: Recipe, question: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        algorithm(question, text, recipe)
