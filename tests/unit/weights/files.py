"""Small safetensors files for the tests of this folder."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from astraflow.types import Manifest
from astraflow.weights.manifest import manifest_of_folder


def model(folder: Path, *, seed: int = 0, shards: int = 1) -> Path:
    """A folder like ``save_pretrained`` writes, its bits decided by ``seed``."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for shard in range(shards):
        name = "model.safetensors" if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        # The first shard is the same for every seed: a part that did not change.
        source = np.random.default_rng(99) if shards > 1 and shard == 0 else rng
        tensors = {f"w{shard}.{n}": source.normal(size=(16, 8)).astype(np.float32) for n in range(3)}
        save_file(tensors, str(folder / name))
    (folder / "config.json").write_text("{}")
    return folder


def manifest(folder: Path, *, version: int = 0, serial: int = 1, policy: str = "p") -> Manifest:
    import msgspec

    return msgspec.structs.replace(manifest_of_folder(folder, policy, version=version), serial=serial)


def raw_file(header: Any, data: bytes = b"", *, size: int | None = None) -> bytes:
    """Bytes of a safetensors file with any header, its length told rightly or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data
