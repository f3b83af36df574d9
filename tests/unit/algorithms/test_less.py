"""LESS: influence by its formula, and the tasks that it leaves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.algorithms.curate import Less
from astraflow.algorithms.curate.less import influence
from astraflow.errors import ConfigError
from astraflow.tasks.generated import GeneratedTasks
from astraflow.tasks.lists import ListTasks
from astraflow.tasks.mixture import Mixture
from astraflow.types import Task
from tests.unit.algorithms.curate_build import admitted


def rows(name: str, gradients, *, datasets=None) -> ListTasks:
    return ListTasks(name, [Task(key=f"{name}{i}", features={"g": np.array(g)}) for i, g in enumerate(gradients)])


TASKS = rows("t", [(1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (3.0, 3.0), (0.0, 0.0)])


def less(tasks=TASKS, goals=((1.0, 0.0),), **more) -> Less:
    options = {"group_size": 2, "feature": "g", "fraction": 0.4, **more}
    held_out = goals if hasattr(goals, "task") else rows("h", goals)
    return Less(tasks, held_out=held_out, **options)


def test_influence_is_the_cosine_with_the_mean_of_the_held_out_gradients():
    assert less().influence.tolist() == pytest.approx([1.0, 0.0, -1.0, 0.5**0.5, 0.0])
    mean = less(goals=[(3.0, 0.0), (0.0, 1.0)]).influence
    assert mean.tolist() == pytest.approx(np.array([3.0, 1.0, -3.0, 4.0 / 2**0.5, 0.0]) / 10**0.5)


def test_the_largest_fraction_is_chosen_and_comes_once_an_epoch():
    curate = less(epochs=2)
    assert curate.size == 2 and curate.groups == 4
    found = admitted(curate, 9)
    assert sorted(found[:2]) == sorted(found[2:4]) == ["t0", "t3"] and len(found) == 4
    assert less(fraction=1e-9).size == 1
    assert less(fraction=1.0).size == 5


def test_f63_the_fraction_is_exact():
    """100 x 0.07 is 7.000000000000001 in binary floats."""
    hundred = rows("t", [(float(n), 1.0) for n in range(100)])
    assert [less(hundred, fraction=each).size for each in (0.07, 0.14, 0.29, 0.55, 0.075)] == [7, 14, 29, 55, 8]


def test_of_several_held_out_datasets_the_largest_influence_counts():
    two = [np.array([[[1.0, 0.0]], [[0.0, 1.0]]]), ["a", "b"]]
    gradients = np.array([[[1.0, 0.0]], [[0.0, 2.0]], [[-1.0, -1.0]]])
    assert influence(gradients, *two, np.ones(1)).tolist() == pytest.approx([1.0, 1.0, -(0.5**0.5)])
    mixed = Mixture("held", [(rows("a", [(1.0, 0.0)]), 1), (rows("b", [(0.0, 1.0)]), 1)])
    with pytest.raises(ConfigError, match="Less needs task sources of a known size, 'held' is unbounded"):
        less(goals=mixed)


def test_checkpoints_count_by_their_learning_rates():
    tasks = rows("t", [[(1.0, 0.0), (0.0, 1.0)], [(0.0, 1.0), (1.0, 0.0)]])
    goals = [[(1.0, 0.0), (1.0, 0.0)]]
    assert less(tasks, goals, rates=[3.0, 1.0]).influence.tolist() == [3.0, 1.0]
    assert less(tasks, goals).influence.tolist() == [0.5, 0.5]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 3), st.integers(1, 5))
def test_influence_is_bounded_and_does_not_see_lengths(seed, count, checkpoints, size):
    random = np.random.default_rng(seed)
    gradients = random.normal(size=(count, checkpoints, size))
    goals = random.normal(size=(3, checkpoints, size))
    rates = random.uniform(0.1, 2, checkpoints)
    found = influence(gradients, goals, ["a", "b", "a"], rates)
    assert (np.abs(found) <= rates.sum() * (1 + 1e-12)).all()
    scaled = influence(gradients * 1e200, goals, ["a", "b", "a"], rates)
    assert np.allclose(found, scaled)
    plain = np.array(
        [
            max(
                sum(rates[c] * g[c] @ m[c] / (np.linalg.norm(g[c]) * np.linalg.norm(m[c])) for c in range(checkpoints))
                for m in (goals[[0, 2]].mean(axis=0), goals[1])
            )
            for g in gradients
        ]
    )
    assert np.allclose(found, plain)


def test_a_resume_goes_on_and_other_gradients_are_other_tasks():
    whole = admitted(less(), 9)
    first = less()
    head = admitted(first, 3)
    second = less()
    second.load_state_dict(first.state_dict())
    assert head + admitted(second, 6) == whole
    with pytest.raises(ConfigError, match="its tasks changed"):
        less(goals=[(0.0, 1.0)]).load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction": 0.0}, r"Less.fraction must be in \(0, 1\], found 0.0"),
        ({"fraction": 1.5}, "Less.fraction"),
        ({"feature": "other"}, r"Less: task 't0' of 't' has no feature 'other' \(it has: g\)"),
        ({"goals": [(1.0, 0.0, 0.0)]}, r"feature 'g' has shape \[1, 2\] in 't' and \[1, 3\] in 'h'"),
        ({"rates": [1.0, 2.0]}, "Less.rates must be 1 finite numbers"),
        ({"rates": [0.0]}, "not all 0"),
        ({"rates": [-1.0]}, "at least 0"),
        ({"tasks": rows("t", [1.0, 2.0])}, r"a gradient must be \[d\] or \[C, d\], found \[\]"),
        ({"tasks": GeneratedTasks("n", lambda index: Task(key=str(index)))}, "'n' is unbounded"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ConfigError, match=message):
        less(**options)


def test_there_is_no_task_beyond_those_chosen():
    chosen = less()._chosen
    with pytest.raises(IndexError, match="Less chose 2 tasks of 't', asked for number 2"):
        chosen.task(2)
