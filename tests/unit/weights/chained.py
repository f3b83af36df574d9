"""A trainer's publications by deltas, as files, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import save_file

from astraflow.types import Manifest
from astraflow.weights.chain import Chain
from astraflow.weights.digest import digest_files
from astraflow.weights.publish import Publisher
from astraflow.weights.settings import WeightSettings
from astraflow.weights.store import WeightStore
from tests.unit.weights.arrays import Weights, nudge


def start(seed: int = 0, *, rows: int = 256) -> Weights:
    rng = np.random.default_rng(seed)
    return {
        "embed": rng.normal(size=(rows, 64)).astype(np.float16),
        "layer.w": rng.normal(size=(64, 64)).astype(np.float16),
        "layer.norm": np.ones(64, np.float32),
    }


class Trainer:
    """Takes steps and publishes them; ``again`` is another process of it."""

    def __init__(
        self, store: WeightStore, folder: Path, *, initial: Path | None = None, epoch: int = 1, **settings: int
    ) -> None:
        self.store, self.folder, self.epoch = store, folder, epoch
        self.settings = WeightSettings(**settings)
        chain = Chain(folder / f"chain-{epoch}", self.settings)
        self.publisher = Publisher(store, "p", chain=chain, initial=[initial] if initial else [])
        self.weights = start()
        self.version = 0
        self.serial = 1

    def step(self, *, share: float = 0.01, seed: int | None = None) -> None:
        self.version += 1
        self.weights = nudge(self.weights, share=share, seed=self.version if seed is None else seed)

    async def publish(self) -> Manifest:
        """The current version; what a trainer exports is gone afterwards."""
        export = self.folder / "export" / "model.safetensors"
        export.parent.mkdir(parents=True, exist_ok=True)
        save_file(self.weights, str(export))
        made = await self.publisher.publish(self.version, [export], digest_files([export]), self.epoch)
        export.unlink()
        self.serial += 1
        return msgspec.structs.replace(made, serial=self.serial)

    async def next(self, *, share: float = 0.01, seed: int | None = None) -> Manifest:
        self.step(share=share, seed=seed)
        return await self.publish()
