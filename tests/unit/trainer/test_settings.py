"""Settings refuse with the value and the range; the schedule is a function of the step alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from astraflow.errors import ConfigError
from astraflow.trainer.schedule import learning_rate
from astraflow.trainer.settings import CriticSettings, LossSettings, TrainerSettings


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("lr", -1.0, r"in \[0, 1\], found -1"),
        ("lr", float("nan"), "found nan"),
        ("lr_supervised", 2.0, "found 2.0"),
        ("betas", (0.9, 1.0), r"found \(0.9, 1.0\)"),
        ("weight_decay", -0.1, "found -0.1"),
        ("clip_norm", -1.0, "found -1.0"),
        ("schedule", "cosin", "constant, linear, cosine, found 'cosin'"),
        ("warmup_steps", -1, "at least 0, found -1"),
        ("tokens_per_micro_batch", 0, "at least 1, found 0"),
        ("temperature", 0.0, "> 0, found 0.0"),
        ("dtype", "fp8", "found 'fp8'"),
        ("threads", -1, "found -1"),
        ("checkpoint_every", 0, "at least 1, found 0"),
        ("checkpoints_kept", 0, "at least 1, found 0"),
    ],
)
def test_values_out_of_range_are_named(field: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"TrainerSettings.{field}.*{words}"):
        TrainerSettings(**{field: value})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip_high": -0.1}, "clip_high .*found -0.1"),
        ({"clip_low": 1.0}, r"clip_low must be in \[0, 1\), found 1.0"),
        ({"clip_low": -0.2}, "clip_low .*found -0.2"),
        ({"clip_high": float("inf")}, "clip_high .*found inf"),
        ({"name": "grop"}, "'grop' is unknown; did you mean 'grpo'"),
        ({"aggregation": "mean"}, "aggregation .*found 'mean'"),
        ({"name": "a:b", "aggregation": "mean"}, "aggregation .*found 'mean'"),
        ({"options": {"clip_hihg": 0.2}}, "'grpo' has no option 'clip_hihg'; did you mean 'clip_high'"),
        ({"options": {"clip_low": 0.2}}, r"clip_low is a setting of its own, LossSettings\.clip_low"),
    ],
)
def test_f43_bounds_of_the_clip_and_f97_names_of_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LossSettings(**options)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"options": {"kl": "k2_in_loss"}}, "loss 'grpo': kl 'k2_in_loss' has no effect where kl_coefficient is 0.0"),
        ({"name": "rloo", "clip_low": 0.1}, "clip_low 0.1 has no effect where ratio is 'none'; leave it out"),
        (
            {"name": "ppo", "options": {"value_clip": 0.2}},
            "value_clip 0.2 has no effect where value_coefficient is 0.0",
        ),
        ({"name": "tis", "clip_low": 0.1}, "'tis': clip_low 0.1 has no effect where a batch is one step"),
        ({"name": "mis", "clip_high": 0.3}, "'mis': clip_high 0.3 has no effect where a batch is one step"),
        (
            {"name": "decoupled_ppo", "clip_low": 0.1, "options": {"recompute": True}},
            "clip_low 0.1 has no effect where a batch is one step: what it clips is always 1",
        ),
    ],
)
def test_f98_options_without_effect_name_what_switches_them_on(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LossSettings(**settings)
    LossSettings(options={"kl": "k2_in_loss", "kl_coefficient": 0.1})
    LossSettings(name="rloo", clip_low=0.1, options={"ratio": "sequence"})
    LossSettings(name="decoupled_ppo", clip_low=0.1)
    LossSettings(name="decoupled_ppo", clip_low=0.1, options={"recompute": False})


def test_a_whole_number_beyond_all_floats_is_out_of_range() -> None:
    with pytest.raises(ConfigError, match=r"constant must be finite and > 0 or None, found 1000"):
        LossSettings(name="dr_grpo", constant=10**400)


def test_a_loss_is_called_with_what_was_given() -> None:
    assert LossSettings().arguments == {}
    assert LossSettings(clip_low=0.2, clip_high=0.28).arguments == {"clip_low": 0.2, "clip_high": 0.28}
    given = LossSettings(name="my.module:loss", aggregation="sequence_mean", options={"beta": 2.0})
    assert given.arguments == {"aggregation": "sequence_mean", "beta": 2.0}
    assert given.aggregation_and_constant == ("sequence_mean", None)
    assert LossSettings(aggregation="sequence_sum_over_constant", constant=8).aggregation_and_constant == (
        "sequence_sum_over_constant",
        8,
    )


def test_f98_contradictory_settings_name_both_keys() -> None:
    with pytest.raises(
        ConfigError, match=r"aggregation 'sequence_sum_over_constant' needs constant > 0, found constant None"
    ):
        LossSettings(aggregation="sequence_sum_over_constant")
    with pytest.raises(ConfigError, match=r"constant 4\.0 has no effect where aggregation is 'token_mean'"):
        LossSettings(constant=4.0)
    with pytest.raises(ConfigError, match=r"warmup_steps 10 must be less than Recipe\.steps 10"):
        TrainerSettings(schedule="linear", warmup_steps=10).check_steps(10)
    TrainerSettings(warmup_steps=10).check_steps(10)  # a constant schedule has nothing that could contradict
    TrainerSettings(schedule="cosine", warmup_steps=2).check_steps(10)


def test_f68_warm_up_by_step() -> None:
    settings = TrainerSettings(lr=1.0, warmup_steps=4)
    assert [learning_rate(settings, step=s, steps=6) for s in range(1, 7)] == [0.25, 0.5, 0.75, 1, 1, 1]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decay_starts_at_the_full_rate_and_never_reaches_zero(schedule: str) -> None:
    settings = TrainerSettings(lr=1.0, schedule=schedule, warmup_steps=2)
    rates = [learning_rate(settings, step=s, steps=10) for s in range(1, 11)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert all(a > b for a, b in pairwise(rates[2:]))
    assert 0 < rates[-1] < 0.15
    assert learning_rate(settings, step=11, steps=10) >= 0


def test_supervised_steps_may_have_a_rate_of_their_own() -> None:
    settings = TrainerSettings(lr=0.1, lr_supervised=0.5)
    assert learning_rate(settings, step=1, steps=9, supervised=True) == 0.5
    assert learning_rate(settings, step=1, steps=9) == 0.1
    assert learning_rate(TrainerSettings(lr=0.1), step=1, steps=9, supervised=True) == 0.1


# ── the critic ──

PPO = LossSettings(name="ppo", options={"value_coefficient": 0.5})
VAPO = LossSettings(name="vapo")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("lr", -1.0, r"in \[0, 1\], found -1"),
        ("gamma", 1.1, r"in \[0, 1\], found 1.1"),
        ("lam", -0.1, r"in \[0, 1\], found -0.1"),
        ("lam_returns", float("nan"), "found nan"),
        ("alpha", 0.0, "> 0, found 0.0"),
        ("alpha", float("inf"), "finite and > 0, found inf"),
        ("pretraining", -1, "at least 0, found -1"),
        ("updates", 0, "at least 1, found 0"),
    ],
)
def test_values_of_a_critic_out_of_range_are_named(field: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"CriticSettings.{field}.*{words}"):
        CriticSettings(**{field: value})


@pytest.mark.parametrize(
    ("loss", "critic", "words"),
    [
        (LossSettings(), {"lr": 1e-4}, r"critic has no effect where the loss is 'grpo' \(needs no values\)"),
        (LossSettings(name="ppo"), {"updates": 2}, r"no effect where the loss is 'ppo' \(value_coefficient 0\)"),
        (
            LossSettings(name="vapo", options={"value_clip": 0.2}),
            {},
            "value_clip 0.2 has no effect where TrainerSettings.critic.updates is 1",
        ),
        (PPO, {"alpha": 0.1}, r"alpha 0.1 has no effect where lambda is 0\.95"),
        (VAPO, {"alpha": 0.1, "lam": 0.9}, r"alpha 0.1 has no effect where lambda is 0\.9"),
        (LossSettings(name="value_pretraining"), {"pretraining": 3}, "pretraining 3 has no effect.*never trains"),
        (VAPO, {"lam_returns": 0.9}, "lam_returns is 0.9 and loss 'vapo'.*use lam_returns=1, or nll_weight=0"),
    ],
)
def test_f98_settings_of_a_critic_without_effect_are_refused(
    loss: LossSettings, critic: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        TrainerSettings(loss=loss, critic=CriticSettings(**critic))


def test_which_losses_have_a_critic() -> None:
    assert [each.needs_critic for each in (PPO, VAPO, LossSettings(name="ppo"), LossSettings())] == [1, 1, 0, 0]
    assert CriticSettings().lam_for("vapo") is None and CriticSettings().lam_for("ppo") == 0.95
    assert CriticSettings(lam=0.9).lam_for("vapo") == 0.9
    TrainerSettings(loss=VAPO, critic=CriticSettings(alpha=0.1))
    nothing_positive = LossSettings(name="vapo", options={"nll_weight": 0.0})
    TrainerSettings(loss=nothing_positive, critic=CriticSettings(lam_returns=0.9))


def test_pretraining_leaves_steps_to_the_policy() -> None:
    settings = TrainerSettings(loss=PPO, critic=CriticSettings(pretraining=4))
    assert settings.pretraining_of(10) == 4 and TrainerSettings().pretraining_of(10) == 0
    assert TrainerSettings(loss=LossSettings(name="value_pretraining")).pretraining_of(10) == 10
    settings.check_steps(5)
    with pytest.raises(ConfigError, match=r"pretraining 4 must be less than Recipe\.steps 4"):
        settings.check_steps(4)
    with pytest.raises(
        ConfigError, match=r"warmup_steps 6 must be less than Recipe\.steps 10 less critic.pretraining 4"
    ):
        TrainerSettings(loss=PPO, critic=CriticSettings(pretraining=4), warmup_steps=6, schedule="linear").check_steps(
            10
        )
