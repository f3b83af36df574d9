"""A checkpoint on its way into an engine: read, checked against its manifest, as torch tensors."""

from __future__ import annotations

from pathlib import Path

import torch

from astraflow.errors import DigestMismatch, WeightsRefused
from astraflow.types import Manifest
from astraflow.weights.digest import TensorDigest, combine, digest_tensor
from astraflow.weights.tensors import read_tensors

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def read_checkpoint(manifest: Manifest, files: list[Path]) -> dict[str, torch.Tensor]:
    """Every tensor by name, in memory of its own. The digest is taken of exactly these bytes, after they were read.

    Raises DigestMismatch, WeightsRefused.
    """
    if manifest.base_digest is not None:
        raise WeightsRefused(f"{manifest.policy} v{manifest.version}: the embedded engine loads full weights only")
    parts: list[TensorDigest] = []
    found: dict[str, torch.Tensor] = {}
    for path in files:
        for mapped in read_tensors(path):
            tensor = mapped._replace(data=mapped.data.copy())
            parts.append(digest_tensor(tensor))
            if tensor.dtype not in _DTYPES:
                raise WeightsRefused(
                    f"{path.name}: tensor {tensor.name} is {tensor.dtype}, not a float of 16 or 32 bits"
                )
            found[tensor.name] = torch.from_numpy(tensor.data).view(_DTYPES[tensor.dtype]).reshape(tensor.shape)
    digest = combine(parts)
    if digest != manifest.digest:
        raise DigestMismatch(
            f"{manifest.policy} v{manifest.version}: digest of the tensors is {digest[:12]}, "
            f"the manifest says {manifest.digest[:12]}"
        )
    return found
