"""Settings of another type than they are declared: which, what was found, and the line of the recipe."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from astraflow.errors import ConfigError
from astraflow.run.cli import main
from astraflow.run.config import resolve
from astraflow.run.right_types import fits
from astraflow.tasks.base import TaskSource
from astraflow.tasks.lists import ListTasks
from astraflow.types import Task

RECIPE = """
from astraflow.dataflow.settings import Limits
from astraflow.rollout.workflow import Reward
from astraflow.run.recipe import Eval, Policy, Recipe
from astraflow.run.tiny_model import TinyModel
from astraflow.tasks.generated import GeneratedTasks
from astraflow.trainer.settings import TrainerSettings
from astraflow.types import Sampling, Task


async def play(task, agents):
    return Reward(1.0)


def recipe():
    tasks = GeneratedTasks("x", lambda index: Task(key=str(index)))
    main = Policy(
        model=TinyModel(),
        trainer=TrainerSettings(
            lr=1e-4,
            betas=(0.9, 0.95),
        ),
    )
    return Recipe(
        name="r",
        policies={"main": main},
        workflow=play,
        tasks=tasks,
        sampling=Sampling(max_tokens=8),
        limits=Limits(),
        group_size=4,
        steps=3,
        regions=("a",),
    )
"""

CALLS = {"Recipe": 24, "TrainerSettings": 19, "Sampling": 29}
"""The line at which each of them is called."""


def refused(tmp_path: Path, old: str, new: str) -> tuple[str, int]:
    """What is said, and the line that was changed."""
    assert RECIPE.count(old) == 1, old
    text = textwrap.dedent(RECIPE).replace(old, new)
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        resolve(str(path))
    return str(caught.value), next(n for n, line in enumerate(text.splitlines(), 1) if new.splitlines()[-1] in line)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("steps=3", 'steps="3"', "Recipe.steps must be int, found '3' (str) "),
        ("steps=3", "steps=3.5", "Recipe.steps must be int, found 3.5 (float) "),
        ("steps=3", "steps=None", "Recipe.steps must be int, found None (NoneType) "),
        ("steps=3", "steps=True", "Recipe.steps must be int, found True (bool) "),
        ('name="r"', "name=7", "Recipe.name must be str, found 7 (int) "),
        ("lr=1e-4", 'lr="1e-4"', "TrainerSettings.lr must be float, found '1e-4' (str) "),
        ("betas=(0.9, 0.95)", "betas=0.9", "TrainerSettings.betas must be tuple[float, float], found 0.9 (float) "),
        ("limits=Limits()", "limits={}", "Recipe.limits must be Limits, found {} (dict) "),
        ("tasks=tasks", "tasks=[1, 2]", "Recipe.tasks must be TaskSource, found [1, 2] (list) "),
        ('policies={"main": main}', "policies=[main]", "Recipe.policies must be dict[str, "),
        ('regions=("a",)', "regions=(1,)", "Recipe.regions must be tuple[str, ...], found (1,) (tuple) "),
        ("max_tokens=8", 'max_tokens="8"', "Sampling.max_tokens must be int, found '8' (str) "),
    ],
)
def test_a_setting_of_another_type_is_named_with_its_place(tmp_path: Path, old: str, new: str, words: str) -> None:
    said, line = refused(tmp_path, old, new)
    assert words in said, said
    call = CALLS[said.partition(".")[0]]  # where it broke off; what is found later, at the line itself
    assert f"(mine.py:{line}" in said or f"(mine.py:{call} in recipe)" in said, (said, line)
    assert "recipe() raised" not in said


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("group_size=4", "group_size=0", "Recipe.group_size must be at least 1, found 0 (mine.py:"),
        (
            "group_size=4",
            "group_size=10**12",
            "Recipe.group_size must be at most 65536 episodes, found 1000000000000 (mine",
        ),
        ("lr=1e-4", "lr=1 / 0", "recipe() raised ZeroDivisionError: division by zero (mine.py:20 in recipe)"),
        ("group_size=4", "gruop_size=4", "did you mean group_size? (mine.py:"),
        ("async def play", "1 / 0\n\n\nasync def play", "mported: ZeroDivisionError: division by zero (mine.py:11 in "),
    ],
)
def test_whatever_a_recipe_breaks_off_with_has_its_line(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert words in refused(tmp_path, old, new)[0]


PIPELINE = """
from astraflow.algorithms.credit import GroupMean, Whitened
from astraflow.algorithms.curate import Shuffled
from astraflow.algorithms.pace import BoundedStaleness
from astraflow.algorithms.pipeline import Pipeline
from astraflow.algorithms.select import EarliestDeadline


class Broken(Shuffled):
    def next(self):
        return self.missing


def pipeline(recipe):
    return Pipeline(
        curate=Shuffled(recipe.tasks, group_size=recipe.group_size),
        pace=BoundedStaleness(),
        credit=GroupMean(),
        keep=(),
        select=EarliestDeadline(),
    )
"""


def with_pipeline(tmp_path: Path, old: str, new: str) -> Path:
    """A recipe whose pipeline function is another in one place."""
    assert PIPELINE.count(old) == 1, old
    path = tmp_path / "mine.py"
    path.write_text(PIPELINE.replace(old, new) + RECIPE.replace("steps=3,", "steps=3, pipeline=pipeline,"))
    return path


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "    return Pipeline(",
            "    return 1 / 0, Pipeline(",
            "mine.py: pipeline() raised ZeroDivisionError: ",
        ),
        ("    return Pipeline(", "    Pipeline(", "Recipe.pipeline must give a Pipeline, found NoneType"),
        ("credit=GroupMean()", "credit=GroupMean(sdt=True)", "did you mean std? (mine.py:1"),
        ("credit=GroupMean()", "credit=GroupMean", "Pipeline.credit must be a Credit, found GroupMean (the class"),
        ("keep=()", "keep=(recipe.nothing,)", "pipeline() raised AttributeError: 'Recipe' object has no attribute"),
        ("credit=GroupMean()", "credit=GroupMean(std=2)", "Pipeline.credit.std must be bool, found 2 (int) (mine.py:1"),
    ],
)
def test_a_pipeline_that_breaks_off_is_named_with_its_line(tmp_path: Path, old: str, new: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(str(with_pipeline(tmp_path, old, new)))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("self.missing", "Recipe.pipeline.curate: Broken.next raised AttributeError: 'Broken' object has no attribute"),
        ("17", "Broken.next must answer an Admission of a Task, or None, found int: there is no such task"),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "run"])
def test_a_curate_that_raises_is_named_and_leaves_no_folder(
    verb: str, answer: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = with_pipeline(tmp_path, "curate=Shuffled", "curate=Broken")
    path.write_text(path.read_text().replace("return self.missing", f"return {answer}"))
    run = tmp_path / "run"
    assert main([verb, str(path), *(["--run-dir", str(run)] if verb == "run" else [])]) != 0
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said
    assert ("(mine.py:11 in next)" in said) == (answer != "17")
    assert not run.exists()


def test_the_recipe_as_it_is_is_right(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(RECIPE)
    assert resolve(str(path)).recipe.steps == 3


class Colour(StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "hint", "right"),
    [
        (1, float, True),
        (np.int64(1), int, True),
        (np.float32(1), float, True),
        (True, int, False),
        (1.0, int, False),
        (None, int | None, True),
        ("x", int | None, False),
        ([1, 2], tuple[int, ...], True),
        ([1, "2"], tuple[int, ...], False),
        ({"a": 1}, dict[str, int], True),
        ({"a": "1"}, dict[str, int], False),
        ("x", Literal["x", "y"], True),
        ("z", Literal["x", "y"], False),
        ("red", Colour, True),
        (len, Callable[[], int], True),
        (3, Callable[[], int], False),
        (object(), Any, True),
        (ListTasks("x", [Task(key="1")]), TaskSource, True),
        ([], TaskSource, False),
    ],
)
def test_what_fits(value: Any, hint: Any, right: bool) -> None:
    assert fits(value, hint) is right
