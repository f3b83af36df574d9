"""A new policy for a run that goes on: its weights into the run's store, then one call."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

import msgspec

from astraflow.errors import ConfigError
from astraflow.run.config import read_config
from astraflow.run.layout import RunFolder
from astraflow.run.model_cache import require_model_folder
from astraflow.run.operate import Around, operate, patience_s, require_dataflow
from astraflow.types import Manifest
from astraflow.weights.manifest import manifest_of_folder, weight_files_in
from astraflow.weights.object_store import ObjectStore
from astraflow.weights.store import DirStore, HttpStore, WeightStore
from astraflow.wire.client import HttpDataflow
from astraflow.wire.messages import OperatorRequest


class Wanted(Protocol):
    """What is used of the verb's arguments."""

    @property
    def run(self) -> str: ...
    @property
    def policy(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def model(self) -> Path | None: ...
    @property
    def frozen(self) -> bool: ...
    @property
    def decay(self) -> float | None: ...
    @property
    def ca(self) -> Path | None: ...


async def add_policy(wanted: Wanted) -> Around | None:
    """Raises ConfigError, and what dataflow refuses. Returns what ``operate`` does."""
    source, version = split_source(wanted.source)
    if version is not None and wanted.model is not None:
        raise ConfigError("--model brings the weights: give --source without a version, it says whose model they fit")
    if wanted.decay is not None and not 0 < wanted.decay < 1:
        raise ConfigError(f"--decay must be in (0, 1), found {wanted.decay}")
    manifest = None
    if wanted.model is not None:
        folder = require_model_folder(wanted.model.expanduser().resolve(), what="--model")
        manifest = await _store_weights(wanted.run, folder, wanted.policy, wanted.ca)
    return await operate(
        wanted.run,
        OperatorRequest(
            action="add",
            policy=wanted.policy,
            source=source,
            version=version,
            role=wanted.role,
            frozen=wanted.frozen,
            decay=wanted.decay,
            manifest=manifest,
        ),
        ca=wanted.ca,
    )


def split_source(text: str) -> tuple[str, int | None]:
    """``POLICY`` or ``POLICY@VERSION``. Raises ConfigError."""
    policy, at, version = text.partition("@")
    if not policy or (at and not (version.isascii() and version.isdigit() and len(version) < 19)):
        raise ConfigError(f"--source must be POLICY or POLICY@VERSION, found {text!r}")
    return policy, int(version) if at else None


async def _store_weights(run: str, folder: Path, policy: str, ca: Path | None) -> Manifest:
    """Into the store that the run's workers read: its bucket, its folder, or by dataflow where only that is known."""
    async with HttpDataflow(*require_dataflow(run), retry_s=patience_s(run), ca=ca) as client:
        store = HttpStore(client.weights) if "://" in run else _own_store(RunFolder(Path(run)))
        stored = [await store.put(path, may_link=False) for path in weight_files_in(folder)]
    manifest = await asyncio.to_thread(manifest_of_folder, folder, policy)
    return msgspec.structs.replace(manifest, files=tuple(stored))


def _own_store(run: RunFolder) -> WeightStore:
    bucket = read_config(run.path)["config"].get("store", "")
    return ObjectStore.open(bucket) if bucket else DirStore(run.weights)
