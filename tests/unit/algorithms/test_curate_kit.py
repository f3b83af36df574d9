"""Every way of choosing passes the kit; and what the kit and the dataflow say of tasks that do not exist."""

from __future__ import annotations

import numpy as np
import pytest

from astraflow.algorithms.base import Admission, Curate
from astraflow.algorithms.curate import (
    Dots,
    FilterSolved,
    Greso,
    Less,
    Mixture,
    OverSampled,
    Prioritised,
    Shuffled,
    Stage,
    Stages,
    Uniform,
    WithOlderVersions,
    most_groups,
)
from astraflow.algorithms.curate.compose import Bounded, Sized, tasks_of
from astraflow.tasks.lists import ListTasks
from astraflow.testing.check_algorithm import check_algorithm
from astraflow.types import Task


def featured(count: int = 9, name: str = "rows", seed: int = 0) -> ListTasks:
    random = np.random.default_rng(seed)
    features = random.normal(size=(count, 6)).astype(np.float32)
    return ListTasks(name, [Task(key=f"{name}{i}", features={"x": row}) for i, row in enumerate(features)])


TASKS = featured()
MORE = featured(4, "more", seed=1)
CURATES = {
    "Uniform": lambda: Uniform(TASKS, group_size=4, seed=3),
    "Greso": lambda: Greso(TASKS, group_size=4),
    "Greso, range declared": lambda: Greso(TASKS, group_size=4, reward_range=(0.0, 1.0), policy="policy"),
    "Prioritised": lambda: Prioritised(TASKS, group_size=4),
    "Prioritised, with rests": lambda: Prioritised(TASKS, group_size=4, rest=4, least=0.1),
    "FilterSolved": lambda: FilterSolved(TASKS, group_size=4, reward_range=(0.0, 1.0), probe=0.5),
    "FilterSolved, patient": lambda: FilterSolved(TASKS, group_size=4, rounds=2),
    "Dots": lambda: Dots(TASKS, group_size=4, refresh=2),
    "Dots, by features": lambda: Dots(TASKS, group_size=4, feature="x", refresh=3, references=2, rest=2),
    "Less": lambda: Less(TASKS, held_out=MORE, group_size=4, feature="x", fraction=0.5),
}
WHOLE = {
    **CURATES,
    "Mixture by size": lambda: Mixture(
        [Greso(TASKS, group_size=2), Dots(MORE, group_size=2, refresh=2)], temperature=2.0, seed=1
    ),
    "Stages of learners": lambda: Stages(
        [Stage(curate=Prioritised(TASKS, group_size=2), groups=4), Stage(curate=FilterSolved(MORE, group_size=2))]
    ),
    "OverSampled": lambda: OverSampled(curate=Greso(TASKS, group_size=4)),
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("seed", [0, 7])
def test_every_way_of_choosing_passes_the_kit(name, seed):
    check_algorithm(WHOLE[name], seed=seed)


@pytest.mark.parametrize("name", CURATES)
def test_what_they_choose_exists_and_is_left_as_it_is(name):
    check_algorithm(CURATES[name], tasks=TASKS)


@pytest.mark.parametrize("name", CURATES)
def test_they_say_how_much_they_have(name):
    curate = CURATES[name]()
    assert isinstance(curate, Curate) and isinstance(curate, Bounded) and isinstance(curate, Sized)
    assert curate.groups is None
    assert curate.size == (5 if name == "Less" else 9)


def test_what_is_around_another_knows_how_much_that_has():
    ends = WithOlderVersions(Shuffled(TASKS, group_size=1, epochs=2), chance=0.5)
    assert (most_groups(ends), tasks_of(ends)) == (18, 9)
    assert Mixture([ends, Shuffled(MORE, group_size=1)], temperature=1.0).weights == (1.0, pytest.approx(4 / 9))
    stages = Stages([Stage(curate=ends), Stage(curate=Shuffled(MORE, group_size=1), groups=3)])
    assert (most_groups(stages), tasks_of(stages)) == (21, 13)


class Inventive:
    """Answers with what it likes."""

    def __init__(self, task):
        self.task = task

    def next(self):
        return Admission(task=self.task, episodes=1)

    def observe(self, summary):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Task(key="rows99", dataset="rows"), "admitted task 'rows99' of 'rows': there is no such task in 'rows'"),
        (Task(key="rows1", dataset="rows", payload={"more": 1}), "changed task 'rows1' of 'rows'"),
        (Task(key=""), "there is no such task"),
        ("rows1", "must admit a Task, found 'rows1'"),
    ],
)
def test_the_kit_finds_tasks_that_do_not_exist(task, message):
    with pytest.raises(AssertionError, match=message):
        check_algorithm(lambda: Inventive(task), tasks=TASKS if isinstance(task, Task) and task.key else None)


class Clumsy(Inventive):
    def observe(self, summary):
        summary.units.reward[:] = 0.5


def test_the_kit_finds_one_that_writes_into_what_it_sees():
    with pytest.raises(AssertionError, match="changed the summary"):
        check_algorithm(lambda: Clumsy(TASKS.task(0)))


def test_shuffled_still_stands_where_recipes_import_it_from():
    from astraflow.algorithms import curate

    assert curate.Shuffled is Shuffled and curate.most_groups(Shuffled(TASKS, group_size=1, epochs=2)) == 18
    assert all(hasattr(curate, name) for name in curate.__all__)
