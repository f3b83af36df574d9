"""What starts and stops rollout workers for the autoscaler: processes of this machine, or any two commands.

A name is given once: a worker that has ended is not started again under it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import string
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from astraflow.errors import ConfigError, RunFailed
from astraflow.run.child import Child, ChildSpec, shared_cores
from astraflow.wire.tokens import ENVIRONMENT

log = logging.getLogger("astraflow.autoscale")

DRAIN_S = 60.0
"""How long a local worker that is told to stop may take to hand back what it holds."""
COMMAND_S = 120.0
FIELDS = ("name", "url", "run")


class Actuator(Protocol):
    """``testing`` has one that only counts."""

    async def start(self, name: str) -> None:
        """Begin to start a worker of that name. Raises RunFailed if it cannot be started."""

    async def stop(self, name: str) -> None:
        """Begin to stop it: it takes no more leases and hands back what it holds."""

    def ended(self) -> Sequence[str]:
        """Names of those that are known to have ended, started or stopped here; each is told once."""

    def words(self, name: str) -> str:
        """The last that a worker said, and where its log is; empty: not known here."""

    async def close(self) -> None:
        """End what would not outlive the autoscaler."""


class LocalProcesses:
    """``astraflow rollout`` on this machine; they end with this process, however that ends."""

    def __init__(self, arguments: Sequence[str], *, logs: Path, token: str | None, busy: int) -> None:
        """``arguments``: of ``astraflow``, without ``--name``. ``busy``: heavy processes that share the cores."""
        self._arguments = tuple(arguments)
        self._logs = logs
        self._environment = {**shared_cores(busy, decodes=True), **({ENVIRONMENT: token} if token else {})}
        self._children: dict[str, Child] = {}
        self._ended: dict[str, Child] = {}
        self._stopping: dict[str, asyncio.Task[int]] = {}

    async def start(self, name: str) -> None:
        spec = ChildSpec(
            name=name,
            arguments=(*self._arguments, "--name", name),
            environment=self._environment,
            log=self._logs / f"{name}.log",
        )
        try:
            self._children[name] = await Child.start(spec)
        except OSError as error:
            raise RunFailed(f"worker {name} could not be started: {error}") from error

    async def stop(self, name: str) -> None:
        child = self._children.get(name)
        if child is not None and name not in self._stopping:
            self._stopping[name] = asyncio.create_task(child.end(grace_s=DRAIN_S), name=f"end {name}")

    def ended(self) -> Sequence[str]:
        gone = [name for name, child in self._children.items() if child.code is not None]
        for name in gone:
            child = self._ended[name] = self._children.pop(name)
            if child.code and name not in self._stopping:
                log.warning("worker_died name=%s code=%s: %s", name, child.code, child.last_words(1))
            self._stopping.pop(name, None)
        return gone

    def words(self, name: str) -> str:
        child = self._children.get(name) or self._ended.get(name)
        return f"{child.last_words(1)} (log: {child.spec.log})" if child is not None else ""

    async def close(self) -> None:
        for name in list(self._children):
            await self.stop(name)
        await asyncio.gather(*self._stopping.values())


class Commands:
    """Two templates, ``sbatch worker.sh {name} {url}`` and ``scancel --name {name}``, say. No shell reads them.

    Fields: {name}, {url} and {run}. The token is in the environment of the command, never in its words. What was
    started lives on when the autoscaler ends.
    """

    def __init__(self, start: str, stop: str, *, fields: Mapping[str, str], token: str | None) -> None:
        self._start, self._stop = _words(start, "--start"), _words(stop, "--stop")
        if not any("{name}" in word for word in self._start):
            raise ConfigError("--start must hold {name}: it is how a worker is known later")
        self._fields = dict(fields)
        self._environment = {**os.environ, **({ENVIRONMENT: token} if token else {})}

    async def start(self, name: str) -> None:
        await self._run(self._start, name)

    async def stop(self, name: str) -> None:
        await self._run(self._stop, name)

    def ended(self) -> Sequence[str]:
        """Of a worker that ends somewhere else only dataflow hears; who is told to stop still plays to his end."""
        return ()

    def words(self, name: str) -> str:
        return ""

    async def close(self) -> None:
        return

    async def _run(self, words: Sequence[str], name: str) -> None:
        values = {**self._fields, "name": name}
        command = [word.format_map(values) for word in words]
        # A file, not a pipe: a worker that the command leaves behind would hold a pipe open.
        with tempfile.TemporaryFile() as errors:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=errors,
                    env=self._environment,
                )
            except OSError as error:
                raise RunFailed(f"{shlex.join(command)} could not be run: {error}") from error
            try:
                async with asyncio.timeout(COMMAND_S):
                    code = await process.wait()
            except TimeoutError as error:
                process.kill()
                await process.wait()
                raise RunFailed(f"{shlex.join(command)} did not end within {COMMAND_S:g} s") from error
            if code:
                raise RunFailed(f"{shlex.join(command)} ended with {code}: {_last_line(errors)[:300]}")


def _last_line(said: BinaryIO) -> str:
    said.seek(max(0, said.seek(0, os.SEEK_END) - 4096))
    return (said.read().decode("utf-8", "replace").strip().splitlines() or ["it said nothing"])[-1]


def _words(template: str, flag: str) -> list[str]:
    """Split as a shell would. ConfigError for an empty template or a field that there is not."""
    try:
        words = shlex.split(template)
        named = [field for word in words for _, field, _, _ in string.Formatter().parse(word) if field is not None]
    except ValueError as error:
        raise ConfigError(f"{flag} cannot be read: {error}") from error
    if not words:
        raise ConfigError(f"{flag} must be a command, found nothing")
    unknown = [field for field in named if field not in FIELDS]
    if unknown:
        raise ConfigError(f"{flag} may hold {{name}}, {{url}} and {{run}}, found {{{unknown[0]}}}")
    return words


def names_from(prefix: str, taken: Sequence[str]) -> str:
    """``prefix-N``: one more than any that was ever taken."""
    pattern = re.compile(re.escape(prefix) + r"-(\d+)")
    numbers = [int(found[1]) for name in taken if (found := pattern.fullmatch(name))]
    return f"{prefix}-{max(numbers, default=-1) + 1}"
