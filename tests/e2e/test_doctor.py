"""``astraflow doctor`` on real runs of seconds: a healthy one, and each that was made sick in one way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from astraflow.algorithms.base import GroupSummary
from astraflow.algorithms.keep import DropTruncated, DropZeroVariance
from astraflow.algorithms.keep_content import DropOverlong
from astraflow.dataflow.settings import Limits
from astraflow.observe.doctor import Diagnosis, diagnose
from astraflow.observe.findings import State
from astraflow.rollout.workflow import Agents, Reward
from astraflow.run.symptoms import symptoms_of
from astraflow.trainer.settings import TrainerSettings
from astraflow.types import Sampling, Task
from tests.e2e.micro import play, recipe

pytestmark = pytest.mark.slow
SOON = Limits(barren_groups=16, no_signal_limit=8)
"""What cannot go on ends after sixteen groups."""


async def half_marks(task: Task, agents: Agents) -> Reward:
    await agents["main"].chat([{"role": "user", "content": task.key}])
    return Reward(0.5)


class Always:
    def may_admit(self, rooms: Any) -> bool:
        return True


class MaskAll:
    def verdict(self, summary: GroupSummary, advantages: Any) -> str | None:
        return None

    def mask(self, summary: GroupSummary) -> dict[str, str]:
        return dict.fromkeys(summary.units.sample_id, "forbidden")


def looked_at(
    folder: Path, *, lr: float = 3e-3, check: bool = True, temperature: float | None = None, **more: Any
) -> Any:
    """``sync``: a whole batch, then a step, whatever the machine's speed."""
    trainer = TrainerSettings(lr=lr, dtype="float32", temperature=temperature)
    made = recipe(trainer, **{"steps": 6, "schedule": "sync", "limits": SOON, **more})
    (symptoms,) = symptoms_of(play(made, folder / "run", check=check))
    return diagnose(symptoms)


def states(diagnosis: Diagnosis) -> dict[str, State]:
    return {finding.name: finding.state for finding in diagnosis.findings}


def test_a_healthy_run_is_called_healthy(tmp_path: Path) -> None:
    diagnosis = looked_at(tmp_path, steps=12)
    assert diagnosis.state is State.NORMAL, diagnosis.verdict
    assert set(states(diagnosis).values()) == {State.NORMAL}


@pytest.mark.parametrize(
    ("sickness", "cause", "words"),
    [
        ({"lr": 0.0}, "update", "the learning rate is 0"),
        ({"workflow": half_marks}, "groups", "the reward has one value for everything"),
        ({"workflow": half_marks, "pipeline": {"keep": ()}}, "groups", "the reward has one value for everything"),
        ({"pipeline": {"keep": (MaskAll(),)}}, "keep", "forbidden"),
        (
            {"sampling": Sampling(max_tokens=1), "pipeline": {"keep": (DropTruncated(),)}},
            "mask",
            "replies end at max_tokens",
        ),
        ({"pipeline": {"keep": (DropOverlong(tokens=1), DropZeroVariance())}}, "mask", "overlong"),
    ],
    ids=["lr 0", "equal rewards", "equal rewards kept", "all masked", "truncated", "overlong"],
)
def test_what_is_broken_is_named(tmp_path: Path, sickness: dict[str, Any], cause: str, words: str) -> None:
    diagnosis = looked_at(tmp_path, **sickness)
    assert diagnosis.state is State.BROKEN, diagnosis.verdict
    assert diagnosis.verdict.startswith(f"main: {cause}: ") and words in diagnosis.verdict


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_a_trainer_of_another_temperature_is_named(tmp_path: Path, temperature: float) -> None:
    """No recipe may say it: here it stands for whatever makes log-probs differ. The model is nearly uniform, so the
    gap begins small (0.07 to 0.14 nats) and grows with what it learns; the same weights give 1e-7."""
    diagnosis = looked_at(tmp_path, check=False, temperature=temperature)
    assert states(diagnosis)["log-probs"] in (State.WATCH, State.BROKEN), diagnosis.verdict
    assert {states(diagnosis)[name] for name in ("episodes", "groups", "keep", "steps")} == {State.NORMAL}


def test_groups_that_go_stale_are_named(tmp_path: Path) -> None:
    """More is admitted than can be trained while it is young enough."""
    diagnosis = looked_at(tmp_path, staleness=0, schedule="async", pipeline={"pace": Always()})
    assert states(diagnosis)["staleness"] in (State.WATCH, State.BROKEN), diagnosis.verdict
    assert diagnosis.verdict.startswith("main: staleness: ")
