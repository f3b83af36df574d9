"""Bytes that a worker takes which has missed versions."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from astraflow.run.bench._adam import Weights
from astraflow.weights.chain import Chain
from astraflow.weights.delta import bits_of
from astraflow.weights.plan import plan_path
from astraflow.weights.publish import Publisher
from astraflow.weights.settings import WeightSettings
from astraflow.weights.store import DirStore

MISSED = 20


def catch_up(versions: Iterator[Weights]) -> dict[str, Any]:
    """Bytes from a version to the one ``MISSED`` later, beside full weights and every delta in between."""
    with tempfile.TemporaryDirectory() as place:
        manifests = asyncio.run(_publish(versions, Path(place)))
    plan = plan_path({manifests[0].digest}, manifests[-1])
    assert plan is not None, "full weights are always a way"
    steps = 0
    for before, after in pairwise(manifests):
        steps += next(
            delta.file.size_bytes
            for delta in after.deltas
            if (delta.base_digest, delta.digest) == (before.digest, after.digest)
        )
    full = sum(file.size_bytes for file in manifests[0].files)
    return {"catch_up_bytes": plan.size_bytes, "catch_up_sum_bytes": steps, "catch_up_full_bytes": full}


async def _publish(versions: Iterator[Weights], place: Path) -> list[Any]:
    from safetensors.numpy import save_file

    from astraflow.weights.digest import digest_files

    publisher = Publisher(DirStore(place / "store"), "p", chain=Chain(place / "chain", WeightSettings()))
    found = []
    for version, weights in enumerate(islice(versions, MISSED + 1)):
        path = place / "model.safetensors"
        save_file({name: bits_of(tensor) for name, tensor in weights.items()}, path)
        found.append(await publisher.publish(version, [path], digest_files([path]), may_link=False))
        path.unlink()
    return found
