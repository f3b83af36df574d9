"""``--set path=value``: strict, with the nearest known name (F97)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from astraflow.errors import ConfigError
from astraflow.run.config import canonical_json, to_plain
from astraflow.run.overrides import apply_overrides, nearest_keyword, settable_paths
from astraflow.run.recipe import Policy, Recipe
from astraflow.types import Sampling

Build = Callable[..., Recipe]


@pytest.mark.parametrize(
    ("setting", "path"),
    [
        ("steps=3", "steps"),
        ("policies.main.max_staleness=0", "policies.main.max_staleness"),
        ("policies.main.trainer.lr=1e-4", "policies.main.trainer.lr"),
        ("policies.main.trainer.betas=[0.8,0.9]", "policies.main.trainer.betas"),
        ("policies.main.trainer.schedule=linear", "policies.main.trainer.schedule"),
        ("policies.main.trainable=true", "policies.main.trainable"),
        ("policies.main.model=/models/other", "policies.main.model"),
        ("sampling.temperature=0.7", "sampling.temperature"),
        ('sampling.stop=["a","b"]', "sampling.stop"),
        ("limits.lease_ttl_s=20", "limits.lease_ttl_s"),
        ("limits.min_group=2", "limits.min_group"),
        ("eval.every=5", "eval.every"),
        ("policies.main.trainer.loss.name=gspo", "policies.main.trainer.loss.name"),
    ],
)
def test_a_setting_reaches_its_place_and_no_other(recipe_with: Build, setting: str, path: str) -> None:
    before, after = recipe_with(), apply_overrides(recipe_with(), [setting])
    old, new = dict(settable_paths(before)), dict(settable_paths(after))
    changed = {
        name for name in old if name in new and old[name] != new[name] and not name.startswith(("eval.tasks", "tasks"))
    }
    assert changed - {path} == set()
    assert path in new


def test_types_are_those_of_the_field(recipe_with: Build) -> None:
    recipe = apply_overrides(recipe_with(), ["policies.main.trainer.betas=[0.8,0.9]", "sampling.temperature=1"])
    assert recipe.policies["main"].trainer.betas == (0.8, 0.9)
    assert isinstance(recipe.sampling.temperature, float)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("stepz=3", "did you mean steps?"),
        ("policies.main.max_stalenes=2", "did you mean policies.main.max_staleness?"),
        ("max_staleness=2", "did you mean policies.main.max_staleness?"),
        ("max_stalenes=2", "did you mean policies.main.max_staleness?"),
        ("policies.mian.max_staleness=2", "did you mean policies.main.max_staleness?"),
        ("policies.main.trainer.clip_hgh=0.28", "did you mean policies.main.trainer.loss.clip_high?"),
        ('policies.main.trainer.loss={"clip_hgh":0.28}', "did you mean policies.main.trainer.loss.clip_high?"),
        ("buffer.capcity=5", "there is no setting buffer.capcity"),
        ("steps.more=1", "steps is a single value"),
        ("steps", "must be path=value"),
        ("=3", "must be path=value"),
        ("steps=many", "Expected `int`"),
        ("steps=1.5", "Expected `int`"),
        ("limits.retain=al", "known: checkpoint, all"),
        ("policies.main.trainable=maybe", "Expected `bool`"),
        ("tasks=x", "only the recipe can change"),
        ("pipeline=x", "only the recipe can change"),
        ("steps=-1", "Recipe.steps must be at least 0, found -1"),
        ("sampling.temperature=-0.1", "Sampling.temperature must be finite and >= 0, found -0.1"),
        ("policies.main.trainer.lr=2", "TrainerSettings.lr must be in [0, 1], found 2"),
        ("policies.main.engine.slots=0", "EngineSettings.slots must be at least 1, found 0"),
    ],
)
def test_f97_a_wrong_setting_is_one_sentence_that_names_the_right_one(
    recipe_with: Build, setting: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides(recipe_with(), [setting])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def _other(value: object) -> str | None:
    """Some other legal-looking value, as text."""
    if isinstance(value, bool):
        return "false" if value else "true"
    if isinstance(value, int):
        return str(value + 1)
    if isinstance(value, float):
        return str(value * 0.9 if value else 0.25)
    return None


def test_f97_changing_any_setting_changes_the_config_or_is_refused(recipe_with: Build) -> None:
    """No setting is read by nobody: each is in the resolved config that every process compares."""
    recipe = recipe_with()
    before = canonical_json(to_plain(recipe))
    tried = 0
    for path, value in settable_paths(recipe):
        text = _other(value)
        if text is None:
            continue
        tried += 1
        try:
            after = canonical_json(to_plain(apply_overrides(recipe, [f"{path}={text}"])))
        except ConfigError:
            continue
        assert after != before, path
    assert tried > 30


def test_what_may_be_absent_can_be_taken_away(recipe_with: Build) -> None:
    assert apply_overrides(recipe_with(), ["eval=null"]).eval is None
    with pytest.raises(ConfigError, match="only the recipe can change"):
        apply_overrides(recipe_with(), ["tasks=null"])


def test_the_original_is_untouched(recipe_with: Build) -> None:
    recipe = recipe_with()
    apply_overrides(recipe, ["steps=3", "policies.main.trainer.lr=0.5"])
    assert recipe.steps == 10
    assert recipe.policies["main"].trainer.lr == 2e-5


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: Recipe(groupsize=8), "; did you mean group_size?"),  # type: ignore[call-arg]
        (lambda: Policy(model="m", max_stale=1), "; did you mean max_staleness?"),  # type: ignore[call-arg]
        (lambda: Sampling(max_token=8), "; did you mean max_tokens?"),  # type: ignore[call-arg]
        (lambda: int("x"), ""),
        (lambda: len(1, 2), ""),  # type: ignore[call-arg, arg-type]
    ],
)
def test_a_setting_that_a_recipe_misspells_names_the_nearest(make: Callable[[], object], hint: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        make()
    assert nearest_keyword(error.value, {"Recipe": Recipe, "Policy": Policy, "Sampling": Sampling, "x": 1}) == hint


def test_settings_that_depend_on_each_other_are_changed_at_once(recipe_with: Build) -> None:
    """Each alone is refused: dr_grpo needs a constant, and a constant has no effect in the loss that was there."""
    path = "policies.main.trainer.loss"
    for alone in (f"{path}.name=dr_grpo", f"{path}.constant=64"):
        with pytest.raises(ConfigError, match="constant"):
            apply_overrides(recipe_with(), [alone])
    loss = apply_overrides(recipe_with(), [f'{path}={{"name":"dr_grpo","constant":64}}']).policies["main"].trainer.loss
    assert (loss.name, loss.constant) == ("dr_grpo", 64)
    both = 'policies.main={"trainer.loss.name":"dr_grpo","trainer.loss.constant":64,"trainer.lr":1e-4}'
    trainer = apply_overrides(recipe_with(), [both]).policies["main"].trainer
    assert (trainer.loss.name, trainer.loss.constant, trainer.lr) == ("dr_grpo", 64, 1e-4)


def test_options_of_a_loss_are_free_keys_that_the_loss_checks(recipe_with: Build) -> None:
    path = "policies.main.trainer.loss"
    settings = [
        f"{path}.name=ppo",
        f"{path}.options.dual_clip=3",
        f'{path}.options={{"kl":"k1_in_loss","kl_coefficient":1}}',
    ]
    loss = apply_overrides(recipe_with(), settings).policies["main"].trainer.loss
    assert loss.options == {"dual_clip": 3.0, "kl": "k1_in_loss", "kl_coefficient": 1}
    with pytest.raises(ConfigError, match=r"loss 'ppo' has no option 'dual_clib'; did you mean 'dual_clip'\?"):
        apply_overrides(recipe_with(), [f"{path}.name=ppo", f"{path}.options.dual_clib=3"])
    with pytest.raises(ConfigError, match="dual_clip must be finite and > 1 or None, found 'much'"):
        apply_overrides(recipe_with(), [f"{path}.name=ppo", f"{path}.options.dual_clip=much"])
    critic = f'{path}={{"name":"ppo","options":{{"value_coefficient":0.5}}}}'
    assert apply_overrides(recipe_with(), [critic]).policies["main"].trainer.loss.needs_critic
