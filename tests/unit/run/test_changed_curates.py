"""Learning ways of choosing in a run's config and when its tasks are changed on purpose: nothing else may differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from astraflow.algorithms.curate import Dots, FilterSolved, Greso, Less, Mixture, Prioritised, Shuffled, Uniform
from astraflow.dataflow.ledger import StoredState
from astraflow.errors import ConfigError
from astraflow.run.changed_tasks import _from_the_first_epoch
from astraflow.run.config import to_json, to_plain
from astraflow.run.task_record import changed_digests, without_tasks
from astraflow.tasks.lists import ListTasks
from astraflow.testing.check_algorithm import group_summary
from astraflow.types import Task
from astraflow.wire.codec import decode, encode


def featured(count: int) -> ListTasks:
    return ListTasks("rows", [Task(key=str(n), features={"x": np.array([1.0, n])}) for n in range(count)])


GOAL = featured(2)
MAKE: dict[str, Callable[[ListTasks], Any]] = {
    "Shuffled": lambda tasks: Shuffled(tasks, group_size=2),
    "Uniform": lambda tasks: Uniform(tasks, group_size=2),
    "Greso": lambda tasks: Greso(tasks, group_size=2),
    "Dots": lambda tasks: Dots(tasks, group_size=2, feature="x", refresh=2),
    "Prioritised": lambda tasks: Prioritised(tasks, group_size=2, rest=2),
    "FilterSolved": lambda tasks: FilterSolved(tasks, group_size=2),
    "Less": lambda tasks: Less(tasks, held_out=GOAL, group_size=2, feature="x"),
    "Mixture": lambda tasks: Mixture([Greso(tasks, group_size=2), Shuffled(tasks, group_size=2)], weights=[1, 2]),
}


def played(curate: Any) -> Any:
    for n in range(9):
        curate.observe(group_summary(n, task=curate.next().task, version=n // 3))
    return curate


@pytest.mark.parametrize("name", MAKE)
def test_a_config_with_other_tasks_differs_in_its_tasks_alone(name: str) -> None:
    one, other = (to_json({"curate": to_plain(MAKE[name](featured(count)))}) for count in (8, 11))
    assert one != other and without_tasks(one) == without_tasks(other)
    assert len(changed_digests(one, other)) >= 1
    again = to_json({"curate": to_plain(MAKE[name](featured(8)))})
    assert again == one, "the same in every process"


@pytest.mark.parametrize("name", MAKE)
def test_a_state_survives_the_ledger_and_begins_anew_with_other_tasks(name: str) -> None:
    before, after = featured(8), featured(11)
    curate = played(MAKE[name](before))
    stored = decode(encode(StoredState(state=curate.state_dict())), StoredState).state
    resumed = MAKE[name](before)
    resumed.load_state_dict(stored)
    assert [resumed.next().task.key for _ in range(9)] == [curate.next().task.key for _ in range(9)]
    with pytest.raises(ConfigError, match="its tasks changed"):
        MAKE[name](after).load_state_dict(stored)
    digests = changed_digests(*(to_json({"c": to_plain(MAKE[name](tasks))}) for tasks in (before, after)))
    moved = MAKE[name](after)
    moved.load_state_dict(_from_the_first_epoch(stored, digests))
    fresh = MAKE[name](after)
    if name != "Mixture":  # which goes on with its own draws
        assert [moved.next().task.key for _ in range(9)] == [fresh.next().task.key for _ in range(9)]
