"""One dataflow process over HTTP on loopback, loaded by another process, against what lies below it and beside it.

    load (this process)  lease → submit → [keep] → batch, bytes delivered → commit     ~> dataflow process, run.db

Rivals: the very same SQL statements alone, replayed into a second database; the same hand-offs over Redis streams.
The run folder lies in the system's temporary folder, which must be on a real disk: ``fsync_ms`` shows whether it is.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from astraflow.errors import RunFailed
from astraflow.run.bench import _rivals as rivals
from astraflow.run.bench._load import LEASES, PER_BATCH, POLICY, TOKENS, WORKERS, Load, percentile
from astraflow.run.bench._serve import ENDPOINT
from astraflow.wire.calls import Role
from astraflow.wire.client import HttpDataflow
from astraflow.wire.tokens import Tokens

START_S = 60.0
WARM_SHARE = 0.2
"""Of the run: memory is compared from there to the end."""


TRAJECTORIES = 200_000


def main(*, trajectories: int = TRAJECTORIES) -> dict[str, Any]:
    return run(trajectories=trajectories)


def run(*, trajectories: int = TRAJECTORIES, rival_trajectories: int = 6400, redis: bool = True) -> dict[str, Any]:
    """The figures that docs/benchmarks.md explains; counts are rounded down to whole batches."""
    with tempfile.TemporaryDirectory(prefix="astraflow-bench-") as name:
        folder = Path(name)
        found = _measure(folder, max(1, trajectories // PER_BATCH))
        rate = found["trajectories_per_s"]
        sqlite = rivals.sqlite_per_s(folder / "rival", steps=max(1, rival_trajectories // PER_BATCH))
        found |= {"sqlite_per_s": sqlite, "sqlite_ratio": rate / sqlite}
        found |= rivals.redis_figures(folder / "redis", rate, rival_trajectories) if redis else {}
        return found | {"fsync_ms": _fsync_ms(folder)}


def _measure(folder: Path, steps: int) -> dict[str, Any]:
    run_folder = folder / "run"
    run_folder.mkdir()
    command = [sys.executable, "-m", "astraflow.run.bench._serve", str(run_folder), str(steps)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as server:
        try:
            url = _await_url(server, run_folder)
            began_s = _cpu_s(server.pid)
            load, memory = asyncio.run(_load(url, Tokens.read(run_folder), steps, server.pid))
            cpu_s = _cpu_s(server.pid) - began_s
        finally:
            server.communicate()
    if load.trained != steps * PER_BATCH:
        raise RunFailed(f"{load.trained} trajectories were trained, {steps * PER_BATCH} were asked for")
    warm = memory[int(len(memory) * WARM_SHARE)]
    return {
        "trajectories_per_s": load.trained / load.took_s,
        "lease_p50_ms": percentile(load.lease_s, 0.5) * 1e3,
        "lease_p99_ms": percentile(load.lease_s, 0.99) * 1e3,
        "rss_growth_mb": (memory[-1] - warm) / 1e6,
        "rss_mb": memory[-1] / 1e6,
        "server_cpu_us": cpu_s / load.trained * 1e6,
        "trajectories": load.trained,
        "tokens": TOKENS,
        "workers": WORKERS,
        "leases_per_call": LEASES,
    }


async def _load(url: str, tokens: Tokens, steps: int, server: int) -> tuple[Load, list[int]]:
    """Play it; resident bytes of the server, sampled from start to end."""
    memory = [_rss_bytes(server)]

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.1)
            memory.append(_rss_bytes(server))

    async with (
        HttpDataflow(url, tokens.of(Role.WORKER)) as worker,
        HttpDataflow(url, tokens.of(Role.TRAINER, POLICY)) as trainer,
    ):
        load = Load(worker, trainer, steps)
        watching = asyncio.create_task(watch())
        try:
            await load.run()
        finally:
            watching.cancel()
    return load, [*memory, _rss_bytes(server)]


def _await_url(server: subprocess.Popen[bytes], folder: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        if (folder / ENDPOINT).exists():
            return str(json.loads((folder / ENDPOINT).read_text())["url"])
        time.sleep(0.02)
    raise RunFailed(f"the dataflow process did not listen within {START_S:g} s (exit code {server.poll()})")


def _rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _cpu_s(pid: int) -> float:
    """Of all its threads since the process began."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _fsync_ms(folder: Path) -> float:
    """Median of an fsync after 100 kB: near 0 where the folder is in memory."""
    times = []
    with (folder / "fsync").open("wb") as handle:
        for _ in range(20):
            handle.write(os.urandom(100_000))
            handle.flush()
            began = time.perf_counter()
            os.fsync(handle.fileno())
            times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3
