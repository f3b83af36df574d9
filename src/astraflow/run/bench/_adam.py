"""Consecutive bf16 versions of real weights: simulated Adam steps, real ones of the torch backend, those of a run."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from astraflow.errors import ConfigError
from astraflow.run.layout import RunFolder
from astraflow.run.run_db import open_run_db
from astraflow.types import Array
from astraflow.weights.cache import Cache
from astraflow.weights.rebuild import read_weights
from astraflow.weights.store import DirStore
from astraflow.weights.tensors import Tensor, of_array

Weights = dict[str, Tensor]
SPREAD = ((1 - 0.9) / (1 + 0.9)) ** 0.5
"""Deviation of m/√v (Kingma and Ba, 2014, arXiv 1412.6980) in the steady state, where gradients are independent and
β₁ = 0.9: the variance of an exponential average is (1 - β)/(1 + β) of that of its terms."""


def simulated(weights: Weights, lr: float, *, seed: int, first: bool = False) -> Iterator[Weights]:
    """Version after version, the first included. fp32 masters move by lr · N(0, SPREAD²) and are rounded to bf16; they
    begin anywhere in the interval that rounds to the given weights, as after many steps. ``first``: they move by ± lr,
    which is Adam's very first step whatever the gradients are, and the most that it does where their sign stays."""
    masters = {}
    for number, (name, tensor) in enumerate(weights.items()):
        rng = np.random.default_rng((seed, number))
        bits = tensor.data.view(np.uint16).astype(np.uint32) << 16
        zeros = np.flatnonzero(bits << 1 == 0)  # of quantised models: after some steps they are small, and no zeros
        bits += rng.integers(-0x7FFF, 0x8000, len(bits), np.int32).view(np.uint32)
        master = bits.view(np.float32)
        master[zeros] = 20 * lr * SPREAD * rng.standard_normal(len(zeros))
        masters[name] = master
    rng = np.random.default_rng((seed, len(weights)))
    while True:
        yield {name: _as_bf16(name, masters[name], weights[name].shape) for name in weights}
        for master in masters.values():
            drawn = rng.standard_normal(len(master), np.float32)
            master -= np.float32(lr) * np.sign(drawn) if first else np.float32(lr * SPREAD) * drawn


def trained(folder: Path, *, steps: int, lr: float, seed: int) -> Iterator[Weights]:
    """Versions that the torch backend makes of a few supervised rows."""
    from astraflow.backends.models import as_bits
    from astraflow.backends.torch_single import TorchBackend
    from astraflow.run.bench.trainer import _vocabulary, make_batch
    from astraflow.trainer.settings import TrainerSettings

    backend = TorchBackend(folder, TrainerSettings(lr=lr), steps=steps)
    for step in range(steps):
        report = backend.step(make_batch(rows=2, seed=seed + step, vocabulary=_vocabulary(folder)))
        assert report.updated, report.reason
        yield {tensor.name: tensor._replace(data=tensor.data.copy()) for tensor in as_bits(backend.tensors())}


def published(run_dir: Path) -> tuple[Weights, Weights]:
    """The last two versions of a run's first trained policy, by its store. Raises ConfigError, NotFound."""
    run = RunFolder(run_dir)
    with open_run_db(run.database) as database, tempfile.TemporaryDirectory() as folder:
        row = database.connection.execute(
            "SELECT policy, MAX(version) FROM publications WHERE version > 0 GROUP BY policy ORDER BY policy LIMIT 1"
        ).fetchone()
        if row is None or row[1] < 2:
            raise ConfigError(f"{run_dir}: no policy of this run has two trained versions to compare")
        policy, newest = row
        cache = Cache(DirStore(run.weights), Path(folder))

        async def fetch(version: int) -> Weights:
            return bf16_weights(await cache.fetch(database.manifest(policy, version)))

        async def both() -> tuple[Weights, Weights]:
            return await fetch(newest - 1), await fetch(newest)

        return asyncio.run(both())


def bf16_weights(files: list[Path]) -> Weights:
    """The bf16 tensors of a model folder, in memory of their own."""
    found = read_weights(files).items()
    return {name: tensor._replace(data=tensor.data.copy()) for name, tensor in found if tensor.dtype == "BF16"}


def _as_bf16(name: str, values: Array, shape: tuple[int, ...]) -> Tensor:
    """Rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return of_array(name, rounded.reshape(shape), dtype="BF16")
