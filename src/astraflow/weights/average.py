"""A moving average of versions, in float32 on the CPU: what an opponent is made of that lags behind smoothly. No torch.

    a ← dᵏ · a + (1 − dᵏ) · w        k versions after the last one that was taken in; w: the newest

Versions in between that nobody saw count as the one that was. Kept in float32 between the versions: rounded to bf16
every time, a small step would never arrive. Files are like those that ``w`` came in, with the average's values.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from astraflow.errors import WeightsRefused
from astraflow.types import Array
from astraflow.weights.tensors import Tensor, parse_tensors, read_metadata

STATE = "average.safetensors"


class MovingAverage:
    """``take`` the newest version, ``write`` the average; ``save`` and ``load`` between lives of the process."""

    def __init__(self, decay: float) -> None:
        self.version: int | None = None
        """Of the averaged policy, that was taken in last."""
        self._decay = decay
        self._mean: dict[str, Array] = {}

    def begin(self, version: int, files: Iterable[Path]) -> None:
        """From these weights, as of ``version``."""
        self._mean = {each.name: to_float(each) for path in files for each in _read(path)[1]}
        self.version = version

    def take(self, version: int, files: Iterable[Path]) -> None:
        """Raises WeightsRefused for weights of another model; nothing has then changed."""
        assert self.version is not None, "begin or load first"
        new = {each.name: to_float(each) for path in files for each in _read(path)[1]}
        if {name: each.shape for name, each in new.items()} != {name: each.shape for name, each in self._mean.items()}:
            raise WeightsRefused(f"version {version} has other tensors than the average so far")
        keeps = np.float32(self._decay ** max(1, version - self.version))
        for name, mean in self._mean.items():
            mean *= keeps
            mean += (np.float32(1.0) - keeps) * new[name]
        self.version = version

    def write(self, like: Sequence[Path], folder: Path) -> list[Path]:
        """The average in files of the names, headers and dtypes of ``like``."""
        made = []
        for path in like:
            buffer, tensors = _read(path)
            for each in tensors:
                each.data[:] = of_float(self._mean[each.name], each)
            target = folder / path.name
            buffer.tofile(target)
            made.append(target)
        return made

    def save(self, folder: Path) -> None:
        """Whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".part-{secrets.token_hex(8)}"
        try:
            save_file(self._mean, part, {"version": json.dumps(self.version)})
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.replace(folder / STATE)
        finally:
            part.unlink(missing_ok=True)

    def load(self, folder: Path) -> bool:
        """False: nothing was saved there."""
        path = folder / STATE
        if not path.exists():
            return False
        self.version = json.loads(read_metadata(np.fromfile(path, np.uint8), path.name)["version"])
        self._mean = load_file(path)
        return True


def _read(path: Path) -> tuple[Array, list[Tensor]]:
    """The file in memory, and its tensors as views of that."""
    buffer = np.fromfile(path, np.uint8)
    return buffer, list(parse_tensors(buffer, path.name))


def to_float(tensor: Tensor) -> Array:
    """float32 of the tensor's shape, an array of its own. Raises WeightsRefused for what is no float."""
    if tensor.dtype == "BF16":
        wide = tensor.data.view("<u2").astype(np.uint32) << 16
        return wide.view(np.float32).reshape(tensor.shape)
    kinds = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
    if tensor.dtype not in kinds:
        raise WeightsRefused(f"tensor {tensor.name} is {tensor.dtype}: only floats can be averaged")
    return tensor.data.view(kinds[tensor.dtype]).astype(np.float32).reshape(tensor.shape)


def of_float(values: Array, like: Tensor) -> Array:
    """uint8: ``values`` in the dtype of ``like``, rounded to the nearest, ties to even."""
    flat = np.ascontiguousarray(values).reshape(-1)
    if like.dtype == "BF16":
        bits = flat.view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        return rounded.astype("<u2").view(np.uint8)
    return flat.astype({"F16": "<f2", "F32": "<f4", "F64": "<f8"}[like.dtype]).view(np.uint8)
