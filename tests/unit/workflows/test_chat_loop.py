"""An agent in an environment, turn by turn."""

from __future__ import annotations

from typing import Any

from astraflow.rollout.play import WorkflowPlayer
from astraflow.testing.check_workflow import character_template, check_workflow
from astraflow.testing.fake_engine import FakeEngine
from astraflow.testing.virtual_loop import run_virtual
from astraflow.types import Episode, FailureKind, Lease, Manifest, Outcome, Task
from astraflow.workflows.chat_loop import ChatLoop, Observation
from tests.unit.rollout.doubles import seat

TASK = Task(key="t")


class Countdown:
    """Done after so many replies; ``fault`` is raised at the second step."""

    def __init__(self, turns: int, *, fault: Exception | None = None, reward: float | None = 1.0) -> None:
        self.left = turns
        self.closed = 0
        self._fault = fault
        self._reward = reward

    async def reset(self) -> str:
        return f"{self.left} to go"

    async def step(self, action: str) -> Observation:
        self.left -= 1
        if self._fault is not None and self.left <= 1:
            raise self._fault
        return Observation(text=f"{self.left} to go", done=self.left == 0, reward=self._reward)

    async def close(self) -> None:
        self.closed += 1


def played(environment: Countdown, **settings: Any) -> Episode:
    async def make(task: Task) -> Countdown:
        return environment

    async def main() -> Episode:
        engine = FakeEngine(vocabulary=100, end_chance=0.5, end_id=0)
        await engine.load(Manifest(policy="policy", version=0, digest="d", files=(), serial=1), [])
        one = seat(engine, character_template(), policy="policy", max_tokens=64)
        player = WorkflowPlayer(workflow=ChatLoop(make, **settings), seats={"main": one})
        return await player(Lease(group=1, index=0, attempt=1, task=TASK))

    return run_virtual(main)


def test_it_keeps_the_promises_of_a_workflow() -> None:
    async def make(task: Task) -> Countdown:
        return Countdown(3)

    check_workflow(ChatLoop(make, system="count"), TASK)


def test_turns_are_one_sample_until_the_end() -> None:
    environment = Countdown(3)
    episode = played(environment)
    assert (episode.outcome, episode.score, environment.closed) == (Outcome.COMPLETED, 1.0, 1)
    (trajectory,) = episode.trajectories
    assert len(trajectory.samples) == 1 and [turn.reward for turn in trajectory.turns] == [1.0] * 3


def test_an_environment_that_breaks_is_its_own_failure() -> None:
    environment = Countdown(3, fault=ConnectionError("the sandbox is gone"))
    episode = played(environment)
    assert (episode.failure, environment.closed) == (FailureKind.ENV, 1)
    assert "the sandbox is gone" in str(episode.error)


def test_no_end_within_the_turns_is_graded_as_unfinished() -> None:
    episode = played(Countdown(100), max_turns=4, unfinished=-1.0)
    assert episode.score == -1.0 and len(episode.trajectories[0].turns) == 4


def test_an_environment_without_an_opinion_is_not_scored() -> None:
    episode = played(Countdown(2, reward=None))
    assert episode.outcome is Outcome.COMPLETED and episode.score is None
