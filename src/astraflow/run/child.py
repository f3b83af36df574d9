"""One process of a run: started with a lifeline, a log file, its share of the cores; told to stop, or killed.

The lifeline is the child's standard input: a pipe that only the launcher holds open. When the launcher dies, however
it dies, the child reads the end and exits: no process outlives its run.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from astraflow.engines.threads import available_cores

LIFELINE = "ASTRAFLOW_LIFELINE"
"""Set for processes that a launcher started."""
ORPHANED = 75
WHERE = signal.SIGUSR2
"""A child answers it with the stack of each of its threads, in its log; without any help of Python's main loop."""
WRITE_S = 1.0
SPEAKS = "astraflow: "
"""Begins the one sentence that a command ends with."""
STDERR = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildSpec:
    """What to start."""

    name: str
    """Of its log file."""
    arguments: tuple[str, ...]
    """After ``python -m astraflow.run.cli``."""
    environment: Mapping[str, str] = field(repr=False)
    """Beside the launcher's own; holds the token, never shown."""
    log: Path


class Child:
    """A started process."""

    def __init__(
        self, spec: ChildSpec, process: asyncio.subprocess.Process, started_s: float, *, log_from: int = 0
    ) -> None:
        """``log_from``: size of its log when it was started; what stands before is of earlier ones."""
        self.spec = spec
        self.started_s = started_s
        self._process = process
        self._log_from = log_from

    @classmethod
    async def start(cls, spec: ChildSpec) -> Child:
        environment = {**os.environ, **spec.environment, LIFELINE: "1", "PYTHONUNBUFFERED": "1"}
        with spec.log.open("ab") as log:
            log_from = log.tell()
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "astraflow.run.cli",
                *spec.arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        return cls(spec, process, asyncio.get_running_loop().time(), log_from=log_from)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def stop(self) -> None:
        """Ask for a clean end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def end_hung(self) -> None:
        """It does not listen: let it write where its threads are, as far as it can, and kill it."""
        self._signal(WHERE)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), WRITE_S)
        self.kill()

    async def end(self, *, grace_s: float) -> int:
        """Ask, wait so long, then kill."""
        self.stop()
        try:
            return await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            self.kill()
            return await self.wait()

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    @property
    def sentence(self) -> str | None:
        """The one that it died with, if it said one."""
        sentences = [line for line in self._tail() if line.startswith(SPEAKS)]
        return sentences[-1].removeprefix(SPEAKS) if sentences else None

    def last_words(self, lines: int = 12) -> str:
        """The sentence that it died with; else the end of what it wrote to its log."""
        return self.sentence or "\n".join(self._tail()[-lines:]) or f"nothing in {self.spec.log}"

    def _tail(self) -> list[str]:
        return read_tail(self.spec.log, begin=self._log_from)


def read_tail(path: Path, size: int = 16384, *, begin: int = 0) -> list[str]:
    """Last complete lines of a text file, without empty ones; ``begin``: none before that byte."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(begin, path.stat().st_size - size))
        return [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]


def hold_lifeline() -> None:
    """Called by a child: ends this process at once when its launcher is gone. ``WHERE`` is answered from here on."""
    faulthandler.register(WHERE, file=STDERR, all_threads=True)
    if not os.environ.get(LIFELINE):
        return

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(ORPHANED)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


SPINS = "10000"
"""Rounds that an OpenMP thread of a decoding engine waits awake: tens of microseconds.

A decode step is hundreds of short parallel regions, and going to sleep after each makes it half as fast. The engine
uses several threads only while that is faster (``engines.threads``)."""


def shared_cores(busy: int, cores: int | None = None, *, decodes: bool = False) -> dict[str, str]:
    """Environment of a process that shares the machine with ``busy`` heavy ones, itself included.

    Two processes of two spinning OpenMP threads each on two cores run at a thirtieth of their speed.
    """
    found = cores or available_cores()
    threads = str(max(1, found // max(1, busy)))
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        **({"GOMP_SPINCOUNT": SPINS} if decodes else {}),
    }
