"""What the dataflow bench compares with: its own SQL statements alone, and Redis streams."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from astraflow.dataflow.ledger import Ledger
from astraflow.dataflow.local import LocalDataflow
from astraflow.dataflow.service import DataflowService
from astraflow.dataflow.store import Store, connect
from astraflow.errors import RunFailed
from astraflow.run.bench._load import PER_BATCH, PROMPT, TOKENS, WORKERS, Load, make_spec, manifest

REDIS = "redis-server"
REDIS_START_S = 10.0
EPISODE_BYTES = TOKENS * 9 + PROMPT
LEASED_AT_ONCE = 16
ROUNDS = 3
"""A rival counts with its best of so many: they are short, and the machine may be busy with something else."""
Statement = tuple[bool, str, Any]
"""(executemany, SQL, values)"""


# ── SQLite ──


def sqlite_per_s(folder: Path, *, steps: int) -> float:
    """Trajectories a second of the statements alone: recorded from a run in this process, replayed into new files."""
    (folder / "recorded").mkdir(parents=True)
    statements = asyncio.run(_record(folder / "recorded", steps))
    return max(_replay_per_s(folder / f"replayed{n}.db", statements, steps) for n in range(ROUNDS))


def _replay_per_s(path: Path, statements: Sequence[Statement], steps: int) -> float:
    connection = connect(path)
    Store(connection)
    one, many = connection.execute, connection.executemany
    began = time.perf_counter()
    for is_many, sql, values in statements:
        if is_many:
            many(sql, values)
        else:
            one(sql, values).fetchall()
    took = time.perf_counter() - began
    trained = connection.execute("SELECT COUNT(*) FROM samples WHERE state = 'trained'").fetchone()[0]
    connection.close()
    if trained != steps * PER_BATCH:
        raise RunFailed(f"the replayed statements trained {trained} trajectories, not {steps * PER_BATCH}")
    return steps * PER_BATCH / took


async def _record(folder: Path, steps: int) -> list[Statement]:
    spec = make_spec(steps)
    ledger = Ledger(connect(folder / "run.db"), spec, payloads=folder / "payloads")
    statements: list[Statement] = []
    execute, execute_many = ledger.store.run, ledger.store.run_many

    def run(sql: str, values: Any = ()) -> Any:
        statements.append((False, sql, values))
        return execute(sql, values)

    def run_many(sql: str, values: Iterable[Any]) -> Any:
        listed = list(values)
        statements.append((True, sql, listed))
        return execute_many(sql, listed)

    setattr(ledger.store, "run", run)  # noqa: B010 - the recorder stands where the connection's own method is
    setattr(ledger.store, "run_many", run_many)  # noqa: B010
    service = DataflowService(spec, ledger)
    await service.publish_initial(manifest(0))
    flow = LocalDataflow(service)
    await Load(flow, flow, steps).run()
    await service.close()
    return statements


# ── Redis ──


def redis_figures(folder: Path, rate: float, trajectories: int) -> dict[str, Any]:
    """Ratios to the same hand-offs over bare streams, appendfsync everysec and always; None where there is no Redis."""
    if shutil.which(REDIS) is None:
        why = f"{REDIS} is not installed"
        return {"redis_everysec_ratio": None, "redis_always_ratio": None, "redis_reason": why}
    found: dict[str, Any] = {}
    for policy in ("everysec", "always"):
        steps = max(1, trajectories // PER_BATCH)
        theirs = max(_redis_per_s(folder / f"{policy}{n}", policy, steps) for n in range(ROUNDS))
        found |= {f"redis_{policy}_per_s": theirs, f"redis_{policy}_ratio": rate / theirs}
    return found


def _redis_per_s(folder: Path, policy: str, steps: int) -> float:
    folder.mkdir(parents=True)
    path = folder / "redis.sock"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--unixsocket", str(path)]
    options += ["--save", "", "--appendonly", "yes", "--appendfsync", policy, "--daemonize", "no"]
    with subprocess.Popen([REDIS, *options], stdout=subprocess.DEVNULL) as server:
        try:
            _await_socket(server, path)
            return asyncio.run(_streams(port, steps))
        finally:
            server.terminate()
            server.wait(REDIS_START_S)


def _await_socket(server: subprocess.Popen[bytes], path: Path) -> None:
    deadline = time.monotonic() + REDIS_START_S
    while not path.exists():
        if time.monotonic() > deadline or server.poll() is not None:
            raise RunFailed(f"{REDIS} did not start (exit code {server.poll()})")
        time.sleep(0.02)


class Redis:
    """One connection that speaks just enough RESP; commands of a call go out together."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, port: int) -> Redis:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 24))

    async def call(self, *commands: tuple[bytes | str | int, ...]) -> list[Any]:
        out = []
        for command in commands:
            words = [word if isinstance(word, bytes) else str(word).encode() for word in command]
            out.append(b"*%d\r\n" % len(words))
            out += [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
        self._writer.write(b"".join(out))
        await self._writer.drain()
        return [await self._reply() for _ in commands]

    async def _reply(self) -> Any:
        line = (await self._reader.readuntil(b"\r\n"))[:-2]
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            raise RunFailed(f"{REDIS}: {rest.decode(errors='replace')}")
        if kind == b"$":
            return None if rest == b"-1" else (await self._reader.readexactly(int(rest) + 2))[:-2]
        if kind == b"*":
            return None if rest == b"-1" else [await self._reply() for _ in range(int(rest))]
        return int(rest) if kind == b":" else rest

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


async def _streams(port: int, steps: int) -> float:
    """Trajectories a second: task stream → workers → episode stream → trainer, acknowledged and deleted at the end.

    Kinder to Redis than what it stands for: no group is waited for, nothing is judged, no state can be asked.
    """
    total = steps * PER_BATCH
    clients = [await Redis.connect(port) for _ in range(WORKERS + 2)]
    await clients[0].call(
        ("XGROUP", "CREATE", "tasks", "workers", 0, "MKSTREAM"),
        ("XGROUP", "CREATE", "episodes", "trainer", 0, "MKSTREAM"),
    )
    began = time.perf_counter()
    done = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(_feed(clients[0], total))
        for number, client in enumerate(clients[2:]):
            group.create_task(_play(client, f"w{number}", done))
        group.create_task(_train(clients[1], total, done))
    took = time.perf_counter() - began
    for client in clients:
        await client.close()
    return total / took


async def _feed(client: Redis, total: int) -> None:
    for start in range(0, total, PER_BATCH):
        await client.call(*(("XADD", "tasks", "*", "task", start + n) for n in range(PER_BATCH)))


async def _play(client: Redis, name: str, done: asyncio.Event) -> None:
    body = os.urandom(EPISODE_BYTES)
    while not done.is_set():
        (found,) = await client.call(
            ("XREADGROUP", "GROUP", "workers", name, "COUNT", LEASED_AT_ONCE, "BLOCK", 100, "STREAMS", "tasks", ">")
        )
        if not found:
            continue
        ids = [entry[0] for entry in found[0][1]]
        await client.call(
            *(("XADD", "episodes", "*", "body", body) for _ in ids),
            ("XACK", "tasks", "workers", *ids),
            ("XDEL", "tasks", *ids),
        )


async def _train(client: Redis, total: int, done: asyncio.Event) -> None:
    left = total
    while left:
        (found,) = await client.call(
            ("XREADGROUP", "GROUP", "trainer", "t", "COUNT", PER_BATCH, "BLOCK", 1000, "STREAMS", "episodes", ">")
        )
        entries = found[0][1] if found else []
        if any(len(fields[1]) != EPISODE_BYTES for _, fields in entries):
            raise RunFailed(f"{REDIS} delivered an episode of another size")
        ids = [entry[0] for entry in entries]
        if ids:
            await client.call(("XACK", "episodes", "trainer", *ids), ("XDEL", "episodes", *ids))
        left -= len(ids)
    done.set()
