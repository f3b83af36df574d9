"""Curate answers with what is no task: the run stops at once and says which algorithm, and what it answered."""

from __future__ import annotations

from typing import Any

import pytest

from astraflow.algorithms.base import Admission
from astraflow.errors import RunFailed
from astraflow.types import Task
from tests.unit.dataflow.rig import Rig, make_spec, tasks


class Answers:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def next(self) -> Any:
        return self.answer() if callable(self.answer) else self.answer

    def observe(self, summary: Any) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Task(key="a"), "Answers.next must answer an Admission of a Task, or None, found Task: there is no such task"),
        (Admission(task="a", episodes=2), "found one of str: there is no such task"),  # type: ignore[arg-type]
        (Admission(task=Task(key=""), episodes=2), "a task of 'tasks' without a key: there is no such task"),
        (Admission(task=Task(key="a"), episodes=0), "asked for 0 episodes of task 'a'; at least 1 is needed"),
        (Admission(task=Task(key="a"), episodes=True), "asked for True episodes"),
        (
            Admission(task=Task(key="a"), episodes=10**12),
            "asked for 1000000000000 episodes of task 'a', more than 65536",
        ),
        (Admission(task=Task(key="a"), episodes=2, version_choice="x"), "version_choice 'x'"),  # type: ignore[arg-type]
        (lambda: Admission(task=tasks(8).task(8), episodes=2), "task source 'tasks' has tasks 0 to 7, asked for 8"),
        (lambda: Admission(task=tasks(8).task(-1), episodes=2), "has tasks 0 to 7, asked for -1"),
    ],
)
def test_a_task_that_does_not_exist_is_a_clear_error(answer: Any, message: str) -> None:
    with Rig(make_spec(curate=Answers(answer))) as rig:
        with pytest.raises(RunFailed, match=message):
            rig.lease()
        assert rig.states("groups") == {}, "nothing was admitted"
