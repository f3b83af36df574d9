"""Weights out of a run's store into a model folder."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from astraflow.disk import writing
from astraflow.errors import ConfigError, DigestMismatch, NotFound, WeightsRefused
from astraflow.run.layout import RunFolder
from astraflow.run.recipe import Recipe
from astraflow.run.run_db import open_run_db
from astraflow.types import Manifest
from astraflow.weights.cache import Cache
from astraflow.weights.object_store import ObjectStore
from astraflow.weights.store import DirStore, WeightStore

INDEX = "model.safetensors.index.json"


def export_version(run: RunFolder, recipe: Recipe, *, policy: str, version: int | None, target: Path) -> Manifest:
    """``target`` is complete or absent. Raises ConfigError, NotFound (never published, or deleted since)."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not empty; name another folder")
    with open_run_db(run.database) as db:
        manifest = db.manifest(policy, version)
        like = db.joined().get(policy, policy)
    with writing(target, "name another folder"):
        target.parent.mkdir(parents=True, exist_ok=True)
        _export(run, recipe, manifest, like, target)
    return manifest


def _export(run: RunFolder, recipe: Recipe, manifest: Manifest, like: str, target: Path) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    pulled = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        store: WeightStore = ObjectStore.open(recipe.store) if recipe.store else DirStore(run.weights)
        stored = asyncio.run(_fetch(store, manifest, pulled, where=recipe.store or str(run.weights)))
        partial.chmod(0o755)
        model = recipe.policies[like].folder()
        copy_all_but_weights(model, partial)
        names = [_file_name(path.name, n, len(stored)) for n, path in enumerate(stored)]
        paths = [partial / name for name in names]
        for source, path in zip(stored, paths, strict=True):
            shutil.copyfile(source, path)
        if len(paths) > 1 and (model / INDEX).exists():
            shutil.copy2(model / INDEX, partial / INDEX)
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(pulled, ignore_errors=True)


async def _fetch(store: WeightStore, manifest: Manifest, into: Path, *, where: str) -> list[Path]:
    """Its files with its digest: as they were published, or an earlier version's with the deltas since."""
    try:
        return await Cache(store, into).fetch(manifest)
    except NotFound as error:
        raise NotFound(
            f"version {manifest.version} of {manifest.policy} is no longer in {where}: "
            "a run keeps version 0 and the newest ones"
        ) from error
    except (DigestMismatch, WeightsRefused) as error:
        raise ConfigError(
            f"the files of version {manifest.version} in {where} do not have its digest: {error}"
        ) from error


def copy_all_but_weights(model: Path, target: Path) -> None:
    """Config, tokenizer, chat template, licence and whatever else lies there."""
    for path in model.iterdir():
        if path.is_file() and path.suffix not in (".safetensors", ".bin", ".gguf") and path.name != INDEX:
            shutil.copy2(path, target / path.name)


def _file_name(stored: str, index: int, count: int) -> str:
    """As ``from_pretrained`` looks for it."""
    if count == 1:
        return "model.safetensors"
    return stored if stored.endswith(".safetensors") else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
