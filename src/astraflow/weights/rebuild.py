"""A version made of another one's files and deltas, as files again. Blocking, and off every decode path."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from astraflow.errors import WeightsRefused
from astraflow.weights.delta import apply_delta
from astraflow.weights.tensors import Tensor, parse_tensors, read_tensors


def read_weights(files: Iterable[Path]) -> dict[str, Tensor]:
    """Every tensor of full weights by name, as views of the mapped files. WeightsRefused if a name repeats."""
    found: dict[str, Tensor] = {}
    for path in files:
        _add(found, read_tensors(path))
    return found


def rebuild(base: Sequence[Path], deltas: Iterable[Path], folder: Path) -> list[Path]:
    """Files like those of ``base`` (same names, headers, order), with the bits that the deltas lead to, in ``folder``.

    Held in memory: the base once, one delta at a time. A file appears when all of it is written. Raises what
    ``apply_delta`` raises; then nothing is written.
    """
    buffers = [(path.name, np.fromfile(path, np.uint8)) for path in base]
    tensors: dict[str, Tensor] = {}
    for name, buffer in buffers:
        _add(tensors, list(parse_tensors(buffer, name)))
    for path in deltas:
        apply_delta(tensors, path.read_bytes())
    made = []
    for name, buffer in buffers:
        part = folder / f".part-{secrets.token_hex(8)}"
        try:
            buffer.tofile(part)
            part.replace(folder / name)
        finally:
            part.unlink(missing_ok=True)
        made.append(folder / name)
    return made


def _add(found: dict[str, Tensor], tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        if tensor.name in found:
            raise WeightsRefused(f"tensor {tensor.name!r} is in two files of the same weights")
        found[tensor.name] = tensor
