"""``astraflow doctor`` on real runs of seconds: a healthy one, and each that was made sick in one way."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from astraflow.algorithms.base import GroupSummary
from astraflow.algorithms.credit import Returns
from astraflow.algorithms.keep import DropTruncated, DropZeroVariance
from astraflow.algorithms.keep_content import DropOverlong
from astraflow.dataflow.settings import Limits
from astraflow.observe.doctor import Diagnosis, diagnose
from astraflow.observe.doctor_critic import LITTLE
from astraflow.observe.findings import RECENT_STEPS, State
from astraflow.rollout.workflow import Agents, Reward
from astraflow.run.layout import RunFolder
from astraflow.run.run_db import open_run_db
from astraflow.run.symptoms import symptoms_of
from astraflow.trainer.settings import CriticSettings, LossSettings, TrainerSettings
from astraflow.types import Sampling, Task
from tests.e2e.micro import metric, play, recipe, small_digits

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
    folder: Path,
    *,
    lr: float = 3e-3,
    check: bool = True,
    temperature: float | None = None,
    learns: dict[str, Any] | None = None,
    **more: Any,
) -> Any:
    """``sync``: a whole batch, then a step, whatever the machine's speed. ``learns``: of the trainer, by name."""
    trainer = TrainerSettings(lr=lr, dtype="float32", temperature=temperature, **(learns or {}))
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


# ── a critic ──


async def thousandfold(task: Task, agents: Agents) -> Reward:
    one = await small_digits(task, agents)
    assert one.episode is not None
    return Reward(1000 * one.episode)


def a_critic(lr: float, *, updates: int = 1, **more: Any) -> dict[str, Any]:
    """For as many steps as it is given before anything is said of it."""
    learns = {
        "loss": LossSettings(name="ppo", options={"value_coefficient": 0.5}),
        "critic": CriticSettings(lr=lr, updates=updates),
    }
    return {"learns": learns, "pipeline": {"credit": Returns(), "keep": ()}, "steps": RECENT_STEPS, **more}


def earned_deviations(run: RunFolder) -> list[float]:
    """Of every step: that of what its trained tokens earned, which in one turn is the reward of their episode."""
    sql = (
        "SELECT p.version, e.score, s.tokens FROM samples s JOIN episodes e USING (group_id, idx) "
        "JOIN group_policy p ON p.group_id = s.group_id AND p.policy = s.policy WHERE s.state = 'trained'"
    )
    with open_run_db(run.database) as db:
        rows = np.array(db.connection.execute(sql).fetchall())
    steps = [rows[rows[:, 0] == version] for version in np.unique(rows[:, 0])]
    return [float(np.repeat(step[:, 1], step[:, 2].astype(int)).std()) for step in steps]


def test_what_is_said_of_a_critic_that_learns_is_what_was_measured(tmp_path: Path) -> None:
    diagnosis = looked_at(tmp_path, **a_critic(3e-3, updates=2))
    run = RunFolder(tmp_path / "run")
    names = ("value_deviation", "return_deviation", "relative_error", "explained_variance")
    series = [metric(run, f"critic/{name}") for name in names]
    values, returns, wrong, explained = (fmean(each) for each in series)
    found = {finding.name: finding for finding in diagnosis.findings}
    assert found["values"].found == f"values vary by {values:.2g}, returns by {returns:.2g}"
    assert found["errors"].found.startswith(f"squared error {wrong:.2g} of what saying 0 would make, value loss ")
    assert found["critic"].found == f"explains {explained:.2g} of the returns' variance"
    assert series[1] == pytest.approx(earned_deviations(run), rel=1e-4)
    assert series[2][0] == pytest.approx(1) and series[2][-1] < 0.8, "it begins by saying 0, and learns"
    assert (found["values"].state, found["errors"].state) == (State.NORMAL, State.NORMAL)
    assert found["critic"].state is (State.NORMAL if explained > LITTLE else State.WATCH), "of so few tokens: either"


@pytest.mark.parametrize(
    ("sickness", "cause", "words"),
    [
        (a_critic(0.0), "values", "critic.lr is 0: it never learns"),
        (a_critic(3e-3, workflow=thousandfold), "values", "the returns are too large for a critic that begins as 0"),
        (a_critic(1.0), "errors", "the critic runs away: lower critic.lr"),
    ],
    ids=["lr 0", "returns of a thousand", "lr 1"],
)
def test_a_critic_that_is_of_no_use_is_named(tmp_path: Path, sickness: dict[str, Any], cause: str, words: str) -> None:
    diagnosis = looked_at(tmp_path, **sickness)
    assert diagnosis.state is State.BROKEN, diagnosis.verdict
    assert diagnosis.verdict.startswith(f"main: {cause}: ") and words in diagnosis.verdict
    assert {states(diagnosis)[name] for name in ("episodes", "groups", "keep", "steps", "mask")} == {State.NORMAL}
