"""By how much log-probs of the same weights differ between right computations: what a canary must let pass.

The reference is transformers in float32; the engine computes in each dtype, with other batches, threads and pieces of
prompts. Beside it, what a canary must not let pass: the weights of another version.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from astraflow.engines.settings import EngineSettings
from astraflow.engines.torch_engine import TorchEngine
from astraflow.run.canary import canary_of
from astraflow.types import Array, Canary
from astraflow.weights.canary import TOLERANCES
from astraflow.weights.manifest import manifest_of_files, weight_files_in

WAYS: dict[str, dict[str, Any]] = {
    "alone": {"slots": 1, "threads": 1},
    "together": {"slots": 8, "threads": 2},
    "in_pieces": {"slots": 8, "threads": 2, "prefill_chunk": 5},
}


def drift(folder: Path) -> dict[str, Any]:
    """By dtype: the largest mean and the largest single difference over all ways, beside the tolerance."""
    files = weight_files_in(folder)
    manifest = manifest_of_files(files, "policy")
    canary = canary_of(folder)(files, manifest.digest)
    found: dict[str, Any] = {}
    for dtype, bound in TOLERANCES.items():
        gaps = {
            way: asyncio.run(_gaps(folder, canary, EngineSettings(dtype=dtype, **how))) for way, how in WAYS.items()
        }
        found[dtype] = {
            "mean": max(float(gap.mean()) for gap in gaps.values()),
            "most": max(float(gap.max()) for gap in gaps.values()),
            "allowed": [bound.mean, bound.most],
            "by_way": {way: [float(gap.mean()), float(gap.max())] for way, gap in gaps.items()},
        }
    return found


async def _gaps(folder: Path, canary: Canary, settings: EngineSettings) -> Array:
    """float64 [all tokens of all replies]"""
    engine = TorchEngine(folder, "policy", settings)
    await engine.start()
    try:
        files = weight_files_in(folder)
        await engine.load(manifest_of_files(files, "policy"), files)
        said = await asyncio.gather(
            *(
                engine.score(np.array(each.tokens, np.int32), np.array(each.reply, np.int32), 0)
                for each in canary.prompts
            )
        )
    finally:
        await engine.close()
    wanted = np.concatenate([np.array(each.logprobs) for each in canary.prompts])
    gap: Array = np.abs(np.concatenate(said).astype(np.float64) - wanted)
    return gap
