"""The arithmetic of a recipe, from settings and file sizes alone: what a step is, what is alive, what it may take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from astraflow.algorithms.base import Curate
from astraflow.algorithms.curate.pool import SUPERVISED
from astraflow.algorithms.pipeline import Pipeline
from astraflow.dataflow.leasing import check_admission
from astraflow.errors import ConfigError
from astraflow.run.checks import existing_folder, model_config
from astraflow.run.config import Resolved, raised
from astraflow.run.recipe import Policy, Recipe
from astraflow.run.tiny_model import TinyModel

MIB = 1 << 20


def plan_of(resolved: Resolved, supply: tuple[int, int] | None = None) -> dict[str, Any]:
    """Plain JSON. Memory is of weights, optimiser and KV cache; activations come on top.

    ``supply``: what ``supply_of`` has said of the recipe before; None: it is asked.
    """
    recipe = resolved.recipe
    policies = {name: _policy(recipe, name, policy) for name, policy in recipe.policies.items()}
    batches = [policy.groups_per_batch for policy in recipe.policies.values() if policy.trainable]
    groups = max(batches, default=0)
    size = recipe.tasks.size
    in_all, rows = supply or supply_of(recipe)
    return {
        "name": recipe.name,
        "digest": resolved.digest,
        "steps": recipe.steps,
        "group_size": recipe.group_size,
        "episodes_per_step": groups * recipe.group_size,
        "episodes_in_all": in_all,
        "supervised_groups": rows,
        "tasks": recipe.tasks.name,
        "tasks_size": size,
        "steps_per_epoch": None if size is None or not groups else size / groups,
        "evaluations": _evaluations(recipe),
        "evaluation_episodes": 0 if recipe.eval is None else recipe.eval.count * recipe.eval.episodes,
        "rollout_services": recipe.services,
        "policies": policies,
        "memory_mib": sum(each["memory_mib"] or 0 for each in policies.values()) or None,
    }


MOST_ASKED = 10_000
"""Groups; whatever comes later counts as played by the recipe's workflow."""


def supply_of(recipe: Recipe) -> tuple[int, int]:
    """Episodes that all steps need, if every group is kept, and how many groups of them are supervised rows.

    The Curate is asked and put back: a row is a group of one, and only of the policy that it teaches. Raises
    ConfigError for a Curate that raises, and RunFailed, as dataflow would, for an answer that nobody can play.
    """
    needs = {name: recipe.policies[name].groups_per_batch * recipe.steps_of(name) for name in recipe.trainable}
    episodes = rows = 0
    if not isinstance(recipe.pipeline, Pipeline):
        return max(0, *needs.values(), 0) * recipe.group_size, 0
    curate = recipe.pipeline.curate
    before = _ask(curate, "state_dict")
    for _ in range(MOST_ASKED):
        found = _ask(curate, "next") if max(needs.values(), default=0) > 0 else None
        if found is None:
            break
        check_admission(found, f"{type(curate).__name__}.next")
        episodes += found.episodes
        is_row = found.task.workflow == SUPERVISED
        rows += is_row
        for name in [found.task.payload.get("policy")] if is_row else list(needs):
            if name in needs:
                needs[name] -= 1
    _ask(curate, "load_state_dict", before)
    return episodes + max(0, *needs.values(), 0) * recipe.group_size, rows


def _ask(curate: Curate, name: str, *arguments: Any) -> Any:
    try:
        return getattr(curate, name)(*arguments)
    except Exception as error:  # user code may raise anything: it is named, and nothing has begun
        raise ConfigError(raised(error, f"Recipe.pipeline.curate: {type(curate).__name__}.{name}")) from error


def _evaluations(recipe: Recipe) -> int:
    if recipe.eval is None:
        return 0
    between = recipe.steps // recipe.eval.every if recipe.eval.every else 0
    last = recipe.steps > 0 and not (recipe.eval.every and recipe.steps % recipe.eval.every == 0)
    return 1 + between + int(last)


def _policy(recipe: Recipe, name: str, policy: Policy) -> dict[str, Any]:
    parameters = parameters_of(policy)
    alive = (policy.max_staleness + 1) * policy.groups_per_batch
    memory = None
    if parameters is not None:
        serving = parameters * 2 * recipe.services
        models = 2 if policy.trainer.loss.needs_critic else 1  # each with gradients and moments
        training = parameters * 16 * models if policy.trainable else 0
        memory = round((serving + training + _kv_bytes(recipe, policy) * recipe.services) / MIB)
    return {
        "trainable": policy.trainable,
        "steps": recipe.steps_of(name) if policy.trainable else 0,
        "parameters": parameters,
        "groups_per_step": policy.groups_per_batch,
        "samples_per_step": policy.groups_per_batch * recipe.group_size,
        "max_staleness": policy.max_staleness,
        "groups_alive_at_most": alive,
        "episodes_alive_at_most": alive * recipe.group_size,
        "memory_mib": memory,
    }


def parameters_of(policy: Policy) -> int | None:
    """From the sizes of the weight files; None when the model is not built yet."""
    if isinstance(policy.model, TinyModel):
        tiny = policy.model
        per_layer = tiny.hidden * (2 * tiny.hidden + 2 * tiny.hidden * tiny.kv_heads // tiny.heads)
        per_layer += 3 * tiny.hidden * tiny.intermediate + 2 * tiny.hidden
        return tiny.layers * per_layer + tiny.hidden * (len(tiny.characters) + 8)
    folder = existing_folder(policy)
    if folder is None:
        return None
    width = 4 if "float32" in str(model_config(policy).get("dtype", model_config(policy).get("torch_dtype"))) else 2
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) // width or None


def _kv_bytes(recipe: Recipe, policy: Policy) -> int:
    config = model_config(policy)
    if isinstance(policy.model, TinyModel):
        tiny = policy.model
        layers, heads, width, context = tiny.layers, tiny.kv_heads, tiny.hidden // tiny.heads, tiny.context
    else:
        layers = config.get("num_hidden_layers", 0)
        heads = config.get("num_key_value_heads", config.get("num_attention_heads", 0))
        hidden = config.get("hidden_size", 0) // max(1, config.get("num_attention_heads", 1))
        width = config.get("head_dim") or hidden
        context = config.get("max_position_embeddings", 0)
    tokens = min(policy.engine.max_context or context, recipe.sampling.max_tokens + 512)
    slots = min(policy.engine.slots, recipe.rollout.slots)
    return int(2 * layers * heads * width * 2 * tokens * slots)


def plan_lines(plan: dict[str, Any]) -> list[str]:
    """For people."""
    epoch = plan["steps_per_epoch"]
    supply = "unbounded" if plan["tasks_size"] is None else f"{plan['tasks_size']} tasks"
    epochs = "" if epoch is None else f", an epoch is {epoch:g} steps"
    alone = plan["supervised_groups"]
    rows = f"; {alone} groups are supervised rows of one episode" if alone else ""
    lines = [
        f"{plan['name']}: {plan['steps']} steps of {plan['episodes_per_step']} episodes (groups of "
        f"{plan['group_size']}{rows}), {plan['episodes_in_all']} episodes in all; dropped groups come on top",
        f"tasks: {plan['tasks']}, {supply}{epochs}",
        f"evaluation: {plan['evaluations']} times {plan['evaluation_episodes']} episodes",
    ]
    for name, policy in plan["policies"].items():
        size = "" if policy["parameters"] is None else f", {policy['parameters'] / 1e6:.1f} M parameters"
        memory = "" if policy["memory_mib"] is None else f", about {policy['memory_mib']} MiB beside activations"
        if not policy["trainable"]:
            lines.append(f"policy {name}: frozen{size}; it plays and is not trained{memory}")
            continue
        alive = policy["groups_alive_at_most"]
        fewer = f" ({policy['groups_per_step']} where all are supervised rows)" if alone else ""
        lines.append(
            f"policy {name}: trained{size}; {policy['steps']} steps of {policy['samples_per_step']} samples{fewer}; "
            f"staleness at most {policy['max_staleness']}: {alive} groups alive at most{memory}"
        )
    return [*lines, f"config digest {plan['digest'][:16]}"]
