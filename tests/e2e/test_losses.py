"""Every loss in a real run: dataflow, engine, trainer, weights and checkpoints; and the critics' losses learn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from astraflow.algorithms.credit import GroupMean, Returns
from astraflow.loss_options import LOSSES
from astraflow.trainer.checkpoints import find_damage
from astraflow.trainer.settings import CriticSettings, LossSettings, TrainerSettings
from tests.e2e.micro import metric, play, recipe

pytestmark = pytest.mark.slow
DIFFERENCES: dict[str, Any] = {"credit": GroupMean(std=False)}
EARNED: dict[str, Any] = {"credit": Returns(), "keep": ()}
PIPELINES = {
    "dr_grpo": DIFFERENCES,
    "kimi": DIFFERENCES,
    "rloo": {"credit": GroupMean(std=False, leave_one_out=True)},
    "reinforce_plus_plus": {"credit": Returns()},
    **dict.fromkeys(("ppo", "vapo", "value_pretraining"), EARNED),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "dr_grpo": {"constant": 4.0},
    "ppo": {"options": {"value_coefficient": 0.5, "kl_coefficient": 0.01}},
    "grpo": {"options": {"kl_coefficient": 0.01}},
    "gspo": {"options": {"variant": "token"}},
    "decoupled_ppo": {"options": {"recompute": True}},
}


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_makes_three_steps(tmp_path: Path, name: str) -> None:
    loss = LossSettings(name=name, **OPTIONS.get(name, {}))
    trainer = TrainerSettings(lr=1e-3, dtype="float32", loss=loss, checkpoint_every=1)
    run = play(recipe(trainer, pipeline=PIPELINES.get(name)), tmp_path / "run")
    tokens = metric(run, "step/trained_tokens")
    assert len(tokens) == 3 and all(each > 0 for each in tokens)
    alone = name == "value_pretraining"
    told = "critic/grad_norm" if alone else "step/grad_norm"
    assert [math.isfinite(each) and each > 0 for each in metric(run, told)] == [True] * 3
    assert len(metric(run, "logprob/gap")) <= 3 * (not alone)
    assert find_damage(run.checkpoints / "main" / "step-00000003", 3) is None
    held = {path.name for path in (run.checkpoints / "main" / "step-00000003").glob("critic.*")}
    critics = {"critic.json", *(f"critic.{part}.safetensors" for part in ("master", "moment1", "moment2"))}
    assert held == (critics if loss.needs_critic else set())


@pytest.mark.parametrize(
    ("loss", "critic"),
    [
        (LossSettings(name="ppo", options={"value_coefficient": 0.5}), CriticSettings(lr=3e-3, updates=2)),
        (LossSettings(name="vapo", options={"positive_above": 0.6}), CriticSettings(lr=3e-3, alpha=1.0, pretraining=4)),
    ],
    ids=["ppo", "vapo"],
)
def test_a_policy_with_a_critic_learns(tmp_path: Path, loss: LossSettings, critic: CriticSettings) -> None:
    """Digits below five: a quarter of the tokens by chance. The critic comes to know more than a constant."""
    trainer = TrainerSettings(lr=3e-3, dtype="float32", loss=loss, critic=critic, checkpoint_every=100)
    made = recipe(trainer, pipeline=EARNED, steps=40, schedule="sync")
    run = play(made, tmp_path / "run")
    rewards = metric(run, "reward/train")
    assert len(metric(run, "step/trained_tokens")) == 40
    assert sum(rewards[-4:]) / 4 > 0.55 > 0.4 > sum(rewards[:4]) / 4
    explained = metric(run, "critic/explained_variance")
    assert sum(explained[-10:]) / 10 > sum(explained[:3]) / 3
