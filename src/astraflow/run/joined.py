"""What a trainer's process has to do: of a policy of the recipe, or of one that joined while the run went on."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from astraflow.errors import ConfigError
from astraflow.run.export import copy_all_but_weights
from astraflow.run.recipe import Recipe
from astraflow.weights.cache import Cache
from astraflow.weights.store import WeightStore
from astraflow.wire.messages import AddedPolicy, ManifestRequest, StatusReply
from astraflow.wire.protocol import Dataflow

INITIAL = "initial"


async def place_of(recipe: Recipe, dataflow: Dataflow, policy: str) -> AddedPolicy:
    """Raises ConfigError for a policy that no trainer is needed for."""
    place = place_in(recipe, policy)
    if place is None:
        added = {each.name: each for each in (await dataflow.status()).added}
        if policy not in added:
            known = ", ".join([*recipe.policies, *added])
            raise ConfigError(f"--policy must be one of {known}, found {policy!r}")
        place = added[policy]
    if not place.trainable and not place.average_of:
        raise ConfigError(f"policy {policy!r} has trainable=False: there is nothing to do for a trainer")
    return place


def place_in(recipe: Recipe, policy: str) -> AddedPolicy | None:
    """Of a policy of the recipe, in the words of one that joins; None: it is not of the recipe."""
    found = recipe.policies.get(policy)
    if found is None:
        return None
    return AddedPolicy(
        name=policy, like=policy, trainable=found.trainable, average_of=found.average_of, decay=found.decay
    )


def need_trainers(recipe: Recipe, status: StatusReply) -> list[str]:
    """Policies that joined and are trained, or are averages: a process each."""
    return [each.name for each in status.added if recipe.steps and (each.trainable or each.average_of)]


async def initial_folder(
    recipe: Recipe, dataflow: Dataflow, store: WeightStore, place: AddedPolicy, into: Path
) -> Path:
    """The model that its training begins with; of what joined, its version 0 out of the store, once."""
    like = recipe.policies[place.like].folder()
    if place.name == place.like:
        return like
    target = into / INITIAL
    if await asyncio.to_thread(target.exists):
        return target
    manifest = await dataflow.manifest(ManifestRequest(policy=place.name, version=0))
    await asyncio.to_thread(into.mkdir, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".initial-", dir=into) as scratch:
        files = await Cache(store, Path(scratch) / "cache").fetch(manifest)
        await asyncio.to_thread(_fill, Path(scratch) / "model", like, files, target)
    return target


def _fill(partial: Path, like: Path, files: list[Path], target: Path) -> None:
    """Complete or absent."""
    partial.mkdir()
    copy_all_but_weights(like, partial)
    for path in files:
        shutil.copyfile(path, partial / path.name)
    partial.replace(target)
