"""Settings that contradict each other, found in well under a second and without loading a model (F98).

Each message names both settings and a fix. Ranges of single settings are their owners' business.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from astraflow.algorithms.base import Replay
from astraflow.algorithms.credit import GroupMean, PerTask, Whitened
from astraflow.algorithms.credit_agents import PerAgent, StateGroups
from astraflow.algorithms.curate import WithOlderVersions, most_groups
from astraflow.algorithms.keep import DropNoAdvantage, DropZeroVariance
from astraflow.errors import BadRequest, ConfigError
from astraflow.rollout.workflow import Reward
from astraflow.run.recipe import Policy, Recipe
from astraflow.run.tiny_model import TinyModel
from astraflow.types import Sampling
from astraflow.weights.digest import form_of_files
from astraflow.weights.manifest import weight_files_in
from astraflow.wire.names import require_name

ADVANTAGES = (GroupMean, PerAgent, StateGroups, Whitened, PerTask)
"""Credits that compare; around them may be others."""
UNDIVIDED = {
    "dr_grpo": "GroupMean(std=False)",
    "rloo": "GroupMean(std=False, leave_one_out=True)",
    "kimi": "GroupMean(std=False)",
}
"""Loss → the credit of its paper."""


def check_recipe(recipe: Recipe) -> None:
    """Raises ConfigError for the first contradiction."""
    for problem in problems(recipe):
        raise ConfigError(problem)


def problems(recipe: Recipe) -> Iterator[str]:
    """Every contradiction, in the order of the tree."""
    yield from _names(recipe)
    yield from _roles(recipe)
    yield from _averages(recipe)
    yield from _places(recipe)
    yield from _workflow(recipe)
    yield from _sampling(recipe)
    yield from _groups(recipe)
    yield from _ends(recipe)
    yield from _older(recipe)
    yield from _evaluation(recipe)
    for name, policy in recipe.policies.items():
        yield from _policy(recipe, name, policy)


def _names(recipe: Recipe) -> Iterator[str]:
    """Policies become file names; roles are what a workflow rewards by."""
    for name in recipe.policies:
        try:
            require_name(name, "a name in Recipe.policies")
        except BadRequest as error:
            yield str(error)
    parameters = inspect.signature(Reward).parameters.values()
    taken = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    for role in recipe.casting:
        if not role:
            yield "Recipe.roles has a role whose name is empty; name it as the workflow does"
        if role in taken:
            yield (
                f"role {role!r} cannot be rewarded: Reward({role}=...) means something else (so do "
                f"{', '.join(each for each in taken if each != role)}); give it another name in Recipe.roles"
            )
    for role in recipe.rollout.role_sampling:
        if role not in recipe.casting:
            yield f"Recipe.rollout.role_sampling names {role!r}, which is no role ({', '.join(recipe.casting)})"


def _roles(recipe: Recipe) -> Iterator[str]:
    for role, policy in recipe.roles.items():
        if policy not in recipe.policies:
            yield f"Recipe.roles[{role!r}] is {policy!r}, not in Recipe.policies ({', '.join(recipe.policies)})"
    idle = sorted(set(recipe.policies) - set(recipe.roles.values())) if recipe.roles else []
    if idle:
        yield f"policy {idle[0]!r} of Recipe.policies plays no role in Recipe.roles; give it one or leave it out"
    if recipe.steps > 0 and not recipe.trainable:
        yield f"Recipe.steps is {recipe.steps}, but no policy has trainable=True; set steps to 0 or train one"


def _averages(recipe: Recipe) -> Iterator[str]:
    for name in recipe.averages:
        source = recipe.policies[name].average_of
        if source not in recipe.trainable:
            yield (
                f"Recipe.policies[{name!r}].average_of is {source!r}, which is no trained policy "
                f"({', '.join(recipe.trainable)})"
            )
            continue
        own, other = _form(recipe.policies[name]), _form(recipe.policies[source])
        if type(own) is type(other) and own != other:
            yield unlike_words(name, source)


def unlike_words(name: str, source: str) -> str:
    return (
        f"Recipe.policies[{name!r}].average_of is {source!r}, whose model has another architecture: the two have no "
        "average; give both the same model"
    )


def _form(policy: Policy) -> str | TinyModel | None:
    """What tells models of other architectures apart; None: its folder is not there yet, the run will see."""
    if isinstance(policy.model, TinyModel):
        return dataclasses.replace(policy.model, seed=0, dtype="float32", context=0)
    folder = existing_folder(policy)
    return form_of_files(weight_files_in(folder)) if folder else None


def _places(recipe: Recipe) -> Iterator[str]:
    if not recipe.places:
        return
    served = {policy for place in recipe.places for policy in place}
    unknown = sorted(served - set(recipe.policies))
    if unknown:
        yield f"Recipe.places names {unknown[0]!r}, not in Recipe.policies ({', '.join(recipe.policies)})"
    missing = sorted(set(recipe.policies) - served)
    if missing:
        yield f"policy {missing[0]!r} of Recipe.policies is in no place of Recipe.places: no service would serve it"
    if not all(recipe.places):
        yield "Recipe.places holds a place without policies; name at least one, or leave Recipe.places out"
    if recipe.services < len(recipe.places):
        yield (
            f"Recipe.places has {len(recipe.places)} places and Recipe.services is {recipe.services}: "
            f"set services to at least {len(recipe.places)}"
        )


def _workflow(recipe: Recipe) -> Iterator[str]:
    call = recipe.workflow if inspect.isroutine(recipe.workflow) else getattr(recipe.workflow, "__call__", None)  # noqa: B004
    if isinstance(recipe.workflow, type) or not inspect.iscoroutinefunction(call):
        found = getattr(recipe.workflow, "__qualname__", type(recipe.workflow).__qualname__)
        yield f"Recipe.workflow must be an async callable (task, agents) -> Reward, found {found}"


def _sampling(recipe: Recipe) -> Iterator[str]:
    sampling = recipe.sampling
    if recipe.steps > 0 and sampling.temperature == 0:
        yield "Recipe.sampling.temperature is 0 and Recipe.steps is above 0: greedy replies cannot be trained; use 1.0"
    truncated = sampling.top_p < 1 or sampling.top_k > 0
    if recipe.steps > 0 and truncated and not recipe.allow_truncated_sampling:
        yield (
            f"Recipe.sampling has top_p {sampling.top_p} and top_k {sampling.top_k}, which bias the ratios of "
            "training; use top_p=1, top_k=0, or set Recipe.allow_truncated_sampling=True"
        )
    if recipe.rollout.sampling not in (Sampling(), sampling):
        yield (
            "Recipe.rollout.sampling and Recipe.sampling differ: one setting in two places; "
            "set Recipe.sampling and leave rollout.sampling out"
        )
    if recipe.rollout.eval_sampling is not None:
        yield "Recipe.rollout.eval_sampling has no effect: set Recipe.eval.sampling"


def _groups(recipe: Recipe) -> Iterator[str]:
    credit = getattr(recipe.pipeline, "credit", None)
    if recipe.group_size == 1 and isinstance(credit, GroupMean) and recipe.steps > 0:
        yield (
            "Recipe.group_size is 1 and Recipe.pipeline.credit is GroupMean: a group of one has nothing to be compared "
            "with, every advantage is 0; use group_size of at least 2, or credit=Returns()"
        )
    least = recipe.limits.min_group
    if least is not None and least > recipe.group_size:
        yield (
            f"Recipe.limits.min_group is {least} and Recipe.group_size {recipe.group_size}: every group would be "
            "dropped; lower the first or raise the second"
        )


def _ends(recipe: Recipe) -> Iterator[str]:
    """A finite supply of tasks must be enough for every step, even if every group is kept."""
    curate = getattr(recipe.pipeline, "curate", None)
    most = None if curate is None else most_groups(curate)
    for name in recipe.trainable:
        batch, steps = recipe.policies[name].groups_per_batch, recipe.steps_of(name)
        if most is not None and most < steps * batch:
            yield (
                f"Recipe.steps {steps} of Recipe.policies[{name!r}].groups_per_batch {batch} need "
                f"{steps * batch} groups, but {type(curate).__name__} gives only {most} before its tasks are "
                "used up; raise its epochs (None: for ever), or lower steps or groups_per_batch"
            )


def _older(recipe: Recipe) -> Iterator[str]:
    """What lives on samples of older versions, where none may be trained."""
    if any(recipe.policies[name].max_staleness for name in recipe.trainable) or recipe.steps == 0:
        return
    parts = {"select": Replay, "curate": WithOlderVersions}
    for place, kind in parts.items():
        part = getattr(recipe.pipeline, place, None)
        if isinstance(part, kind):
            yield (
                f"Recipe.pipeline.{place} is {type(part).__name__} and max_staleness 0: what an older version sampled "
                f"is never trained; raise max_staleness, or take a {place} without it"
            )


def _evaluation(recipe: Recipe) -> Iterator[str]:
    evaluation = recipe.eval
    if evaluation is None:
        return
    if evaluation.policy and evaluation.policy not in recipe.policies:
        yield f"Recipe.eval.policy {evaluation.policy!r} is not in Recipe.policies ({', '.join(recipe.policies)})"
    elif evaluation.policy and recipe.steps > 0 and evaluation.policy not in (*recipe.trainable, *recipe.averages):
        yield (
            f"Recipe.eval.policy is {evaluation.policy!r}, which has trainable=False: only its version 0 would be "
            f"evaluated, never what is trained; name one of {', '.join(recipe.trainable)}, or leave it out"
        )
    size = evaluation.tasks.size
    if size is not None and evaluation.count > size:
        yield f"Recipe.eval.count is {evaluation.count}, but eval.tasks {evaluation.tasks.name!r} has only {size}"
    if evaluation.tasks is recipe.tasks and recipe.steps > 0:
        yield "Recipe.eval.tasks is Recipe.tasks: held-out tasks would be trained; split them by tasks.held_out"
    for name, policy in recipe.policies.items():
        if policy.trainable and policy.engine.versions_held < 2 and recipe.steps > 0:
            yield (
                f"Recipe.eval and Recipe.policies[{name!r}].engine.versions_held 1: the engine would lose the version "
                "that is evaluated with the first update; use versions_held=2, or leave eval out"
            )
    greedy = evaluation.sampling is None or evaluation.sampling.temperature == 0
    if evaluation.episodes > 1 and greedy:
        yield (
            f"Recipe.eval.episodes is {evaluation.episodes} and Recipe.eval.sampling greedy: all would be equal; "
            "use episodes=1 or a temperature above 0"
        )


def _normalised_twice(recipe: Recipe, where: str, loss: str) -> Iterator[str]:
    """The scale of an advantage would depend on what else is in its group and, again, in its batch (F37)."""
    if loss != "reinforce_plus_plus":
        return
    for credit in _layers(getattr(recipe.pipeline, "credit", None)):
        if isinstance(credit, Whitened | PerTask) or (isinstance(credit, GroupMean) and credit.std):
            yield (
                f"{where} is 'reinforce_plus_plus', which normalises advantages over the batch, and "
                f"Recipe.pipeline.credit {type(credit).__name__} has normalised them before: use "
                "GroupMean(std=False) or Returns()"
            )


def _divided(recipe: Recipe, where: str, loss: str) -> Iterator[str]:
    """A loss that is made for differences of rewards, of which the deviation of a group says nothing."""
    if loss not in UNDIVIDED:
        return
    for credit in _layers(getattr(recipe.pipeline, "credit", None)):
        if isinstance(credit, Whitened | PerTask) or getattr(credit, "std", False):
            yield (
                f"{where} is {loss!r}, whose advantages are differences of rewards, and Recipe.pipeline.credit "
                f"{type(credit).__name__} divides them by their deviation: use {UNDIVIDED[loss]}, or another loss"
            )
            return


def _critic(recipe: Recipe, where: str, loss: str) -> Iterator[str]:
    """The trainer makes the advantages: of rewards as they are, of equal ones too."""
    for credit in _layers(getattr(recipe.pipeline, "credit", None)):
        if isinstance(credit, ADVANTAGES):
            yield (
                f"{where} is {loss!r} with a critic, which wants rewards, and Recipe.pipeline.credit "
                f"{type(credit).__name__} makes advantages of them: use Returns()"
            )
            return
    for keep in getattr(recipe.pipeline, "keep", ()):
        if isinstance(keep, DropZeroVariance | DropNoAdvantage):
            yield (
                f"{where} is {loss!r} with a critic and Recipe.pipeline.keep has {type(keep).__name__}: what equal "
                "rewards are worth, or none, the critic would never see; leave it out"
            )


def _layers(credit: object) -> Iterator[object]:
    """A Credit and those that it stands around, from the outside in."""
    while credit is not None:
        yield credit
        credit = getattr(credit, "credit", None)


def _policy(recipe: Recipe, name: str, policy: Policy) -> Iterator[str]:
    where = f"Recipe.policies[{name!r}]"
    if isinstance(policy.model, str | Path) and not _may_exist(policy.model):
        yield f"{where}.model: there is no folder {policy.model}; 'astraflow models get smollm2' builds one"
    own = policy.trainer.temperature
    if policy.trainable and own is not None and own != recipe.sampling.temperature:
        yield (
            f"{where}.trainer.temperature is {own} and Recipe.sampling.temperature {recipe.sampling.temperature}: "
            "one setting in two places; leave the first out"
        )
    if policy.trainable:
        try:
            policy.trainer.check_steps(recipe.steps_of(name))
        except ConfigError as error:
            yield f"{where}: {error}"
        loss, place = policy.trainer.loss, f"{where}.trainer.loss.name"
        yield from _normalised_twice(recipe, place, loss.name)
        yield from _divided(recipe, place, loss.name)
        if loss.needs_critic:
            yield from _critic(recipe, place, loss.name)
    context = model_context(policy)
    limit = policy.engine.max_context or context
    if context and policy.engine.max_context > context:
        yield (
            f"{where}.engine.max_context is {policy.engine.max_context}, but the model was made for {context} tokens; "
            "lower the first"
        )
    if limit and recipe.sampling.max_tokens >= limit:
        yield (
            f"Recipe.sampling.max_tokens is {recipe.sampling.max_tokens} and {where}.engine.max_context {limit}: "
            "no room is left for a prompt; lower the first"
        )
    if recipe.rollout.slots > policy.engine.max_waiting + policy.engine.slots:
        yield (
            f"Recipe.rollout.slots is {recipe.rollout.slots}, but {where}.engine takes only "
            f"{policy.engine.max_waiting + policy.engine.slots} requests; raise engine.max_waiting"
        )


def _may_exist(model: str | Path) -> bool:
    from astraflow.run.models import KNOWN

    return str(model) in KNOWN or Path(model).expanduser().is_dir()


def model_context(policy: Policy) -> int:
    """Tokens that the model was made for, read from its config.json where that is there already; 0: not known."""
    if isinstance(policy.model, TinyModel):
        return policy.model.context
    found = model_config(policy)
    context = found.get("max_position_embeddings", 0)
    return context if isinstance(context, int) else 0


def model_config(policy: Policy) -> dict[str, Any]:
    """config.json of a model that is on disk; empty when it is not built yet."""
    folder = existing_folder(policy)
    path = folder / "config.json" if folder else None
    if path is None or not path.exists():
        return {}
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return found


def existing_folder(policy: Policy) -> Path | None:
    """The model's folder if nothing must be built for it."""
    from astraflow.run.model_cache import cache_folder

    if isinstance(policy.model, str | Path):
        folder = Path(policy.model).expanduser()
        if folder.is_dir():
            return folder
        cached = cache_folder() / "smollm2-135m-instruct"
        return cached if str(policy.model) == "smollm2" and cached.is_dir() else None
    return None
