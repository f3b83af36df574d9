"""How long decoding stands still while the engine takes new weights: the gap between steps, with an update and without.

The embedded engine decodes all its slots all the time; a version is read from disk, verified, prepared and taken, and
proved by comparing its tensors, while the steps go on. Each number is of the decode thread itself.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.torch import load_file, save_file

from astraflow.engines.attested import AttestedEngine
from astraflow.engines.base import GenerateRequest
from astraflow.engines.settings import EngineSettings
from astraflow.engines.torch_engine import TorchEngine
from astraflow.types import Sampling
from astraflow.weights.manifest import manifest_of_files, weight_files_in

LIMIT_MS = 10.0
"""What a pause may be longer than a decode step."""
DEADLINE_S = 300.0
"""Of the steps before one update."""


def pause(folder: Path, *, slots: int = 8, updates: int = 2, quiet_steps: int = 20, seed: int = 0) -> dict[str, Any]:
    """``quiet_steps``: of decoding without an update before each one."""
    with tempfile.TemporaryDirectory() as place:
        return asyncio.run(_measure(folder, Path(place), slots, updates, quiet_steps, seed))


async def _measure(folder: Path, place: Path, slots: int, updates: int, steps: int, seed: int) -> dict[str, Any]:
    inner = TorchEngine(folder, "policy", EngineSettings(slots=slots, end_ids=()))
    engine = AttestedEngine(inner)
    await engine.start()
    stepped = asyncio.Event()
    ended = _watch(inner, stepped)
    try:
        await engine.load(manifest_of_files(weight_files_in(folder), "policy"), weight_files_in(folder))
        room = min(4096, engine.info().max_context) - 16
        asked = [asyncio.create_task(_decode(engine, room, seed + n)) for n in range(slots)]
        for task in asked:
            task.add_done_callback(lambda _: stepped.set())
        quiet: list[float] = []
        busy: list[float] = []
        for version in range(1, updates + 1):
            files = _version(folder, place, version)
            manifest = msgspec.structs.replace(manifest_of_files(files, "policy", version=version), serial=version)
            began = time.perf_counter()
            await _until(ended, len(ended) + steps, stepped, asked)
            quiet += _gaps(ended, began, time.perf_counter())
            began = time.perf_counter()
            await engine.load(manifest, files)
            taken = time.perf_counter()
            await _until(ended, len(ended) + 1, stepped, asked)
            busy += _gaps(ended, began, taken)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    finally:
        await engine.close()
    return _found(quiet, busy, inner.longest_pause_s, engine.metrics()["weights/attest_s"] / (updates + 1))


def _found(quiet: Sequence[float], busy: Sequence[float], taken_s: float, attest_s: float) -> dict[str, Any]:
    step = float(np.median(quiet))
    longest = max(busy)
    return {
        "decode_step_ms": step * 1e3,
        "decode_step_longest_ms": max(quiet) * 1e3,
        "step_while_updating_ms": float(np.median(busy)) * 1e3,
        "step_while_updating_longest_ms": longest * 1e3,
        "swap_ms": taken_s * 1e3,
        "pause_ms": (longest - step) * 1e3,
        "pause_within": bool(longest - step <= step + LIMIT_MS / 1e3),
        "attest_ms": attest_s * 1e3,
        "steps": [len(quiet), len(busy)],
    }


async def _until(
    ended: Sequence[float], count: int, stepped: asyncio.Event, asked: Sequence[asyncio.Task[None]]
) -> None:
    """Raises what ended one of ``asked``: they go on until they are cancelled."""
    async with asyncio.timeout(DEADLINE_S):
        while len(ended) < count:
            stepped.clear()
            await stepped.wait()
            for task in asked:
                if task.done():
                    task.result()


def _watch(engine: TorchEngine, stepped: asyncio.Event) -> list[float]:
    """When each decode step ended, from now on; ``stepped`` is set after each."""
    decoder, loop = engine._decoder, asyncio.get_running_loop()
    assert decoder is not None, "an engine that has started has one"
    ended: list[float] = []
    real = decoder.step

    def step() -> int:
        rows = real()
        ended.append(time.perf_counter())
        loop.call_soon_threadsafe(stepped.set)
        return rows

    decoder.step = step  # type: ignore[method-assign]
    return ended


def _gaps(ended: Sequence[float], began: float, until: float) -> list[float]:
    """Between one step's end and the next one's, where some of it was in that time."""
    return [after - before for before, after in pairwise(ended) if after > began and before < until]


async def _decode(engine: AttestedEngine, room: int, seed: int) -> None:
    """One sequence after the other, until cancelled."""
    while True:
        prompt = np.random.default_rng(seed).integers(10, 100, 8).astype(np.int32)
        await engine.generate(GenerateRequest(tokens=prompt, sampling=Sampling(max_tokens=room, seed=seed)))
        seed += 1000


def _version(folder: Path, place: Path, version: int) -> list[Path]:
    """The folder's weights, every matrix scaled a little."""
    files = []
    for source in weight_files_in(folder):
        path = place / str(version) / source.name
        path.parent.mkdir(exist_ok=True)
        save_file({name: tensor * (1 + 0.01 * version) for name, tensor in load_file(source).items()}, path)
        files.append(path)
    return files
