"""Version 0 of every policy, trained or frozen: from the recipe's model folders into the run's store.

No torch, unless a canary is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from astraflow.clock import SystemClock
from astraflow.errors import ConfigError
from astraflow.run.canary import canary_of
from astraflow.run.checks import unlike_words
from astraflow.run.layout import COPY, RunFolder, read_json, write_json
from astraflow.run.recipe import Recipe
from astraflow.run.stores import claim_store
from astraflow.types import Manifest
from astraflow.weights.manifest import manifest_of_folder, weight_files_in
from astraflow.weights.store import DirStore, WeightStore


async def publish_initial(
    run: RunFolder, recipe: Recipe, say: Callable[[str], None] = lambda _: None
) -> dict[str, Manifest]:
    """By policy. Doing it again changes nothing: files are named by their content.

    Serials begin with the time of day, so that a worker that outlives a run follows the next one of the same name.
    """
    if run.initial.exists():
        return read_initial(run)
    stores: list[WeightStore] = [DirStore(run.weights)]
    bucket = await claim_store(run, recipe)
    if bucket is not None:
        stores.append(bucket)
    manifests: dict[str, Manifest] = {}
    known: dict[Path, Manifest] = {}
    for name, policy in recipe.policies.items():
        folder = policy.folder(say)
        if folder not in known:
            for path in weight_files_in(folder):
                for store in stores:
                    await store.put(path, may_link=False)
            known[folder] = manifest_of_folder(folder, name)
            if recipe.weights.canary:
                canary = canary_of(folder)(weight_files_in(folder), known[folder].digest)
                known[folder] = msgspec.structs.replace(known[folder], canary=canary)
        manifests[name] = msgspec.structs.replace(known[folder], policy=name, serial=int(SystemClock().wall()))
    for name in recipe.averages:
        source = recipe.policies[name].average_of
        if manifests[name].form != manifests[source].form:
            raise ConfigError(unlike_words(name, source))
    write_json(run.initial, msgspec.to_builtins(manifests))
    return manifests


def read_initial(run: RunFolder) -> dict[str, Manifest]:
    """Raises ConfigError."""
    try:
        return msgspec.convert(read_json(run.initial), dict[str, Manifest])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{run.initial} does not hold the manifests of version 0: {error}; {COPY}") from error
