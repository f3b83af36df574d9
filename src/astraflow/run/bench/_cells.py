"""The cells of a table, each a run of its own: played by worker processes with one torch thread each, kept in a file.

cells.jsonl   one line a finished cell: its settings and what was found; a cell that is there is not played again
worker        ``python -m astraflow.run.bench._cells MODULE``: a cell a line in, a result a line out
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import os
import queue
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from astraflow.errors import ConfigError, RunFailed, TimedOut
from astraflow.run.first_cause import first_cause_only

Cell = dict[str, Any]
"""Plain JSON: every setting of one run."""
LIMIT_S = 7200.0
"""Of one cell."""
LEAVE_S = 30.0
LINE_BYTES = 1 << 26
FILE = "cells.jsonl"


def play_all(module: str, cells: Sequence[Cell], *, processes: int, folder: Path, say: Callable[[str], None]) -> Any:
    """(cell, result) of each, in the order of ``cells``. ``module`` has ``play(cell, folder) -> dict``; the
    folder is the cell's own, the one above it is the worker's: what other cells can use may be left there.

    A cell whose worker dies or takes longer than ``LIMIT_S`` raises; what was finished stays in the file.
    """
    if not cells or processes < 1:
        raise ConfigError(f"seeds must be at least 1 and processes too, found {len(cells)} runs, {processes} processes")
    folder.mkdir(parents=True, exist_ok=True)
    known = read_known(folder / FILE)
    todo = [cell for cell in cells if _key(cell) not in known]
    if todo:
        with first_cause_only():
            asyncio.run(_share(module, todo, min(processes, len(todo)), folder / FILE, say))
        known = read_known(folder / FILE)
    return [(cell, known[_key(cell)]) for cell in cells]


def read_known(file: Path) -> dict[str, Any]:
    """By the cell's settings. A line that was cut off is as if it were not there."""
    known = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            entry = json.loads(line)
            known[_key(entry["cell"])] = entry["found"]
    return known


def _key(cell: Cell) -> str:
    return json.dumps(cell, sort_keys=True)


async def _share(module: str, todo: Sequence[Cell], processes: int, file: Path, say: Callable[[str], None]) -> None:
    waiting = list(reversed(todo))
    done = 0
    began = time.monotonic()

    async def work() -> None:
        nonlocal done
        worker = await _start(module)
        try:
            while waiting:
                cell = waiting.pop()
                found = await _ask(worker, cell)
                with file.open("a", encoding="utf-8") as out:
                    out.write(json.dumps({"cell": cell, "found": found}) + "\n")
                done += 1
                say(f"{done} of {len(todo)} cells, {time.monotonic() - began:.0f} s: {_key(cell)}")
        finally:
            await _end(worker)

    async with asyncio.TaskGroup() as group:
        for _ in range(processes):
            group.create_task(work())


async def _start(module: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-m", "astraflow.run.bench._cells", module)
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment, limit=LINE_BYTES)


async def _ask(worker: asyncio.subprocess.Process, cell: Cell) -> Any:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(f"{json.dumps(cell)}\n".encode())
    try:
        async with asyncio.timeout(LIMIT_S):
            await worker.stdin.drain()
            line = await worker.stdout.readline()
    except TimeoutError as error:
        raise TimedOut(f"cell {_key(cell)} took longer than {LIMIT_S:g} s") from error
    except ConnectionError as error:
        raise RunFailed(f"the worker of cell {_key(cell)} died; its last words are above") from error
    if not line:
        raise RunFailed(f"the worker of cell {_key(cell)} died; its last words are above")
    return json.loads(line)


async def _end(worker: asyncio.subprocess.Process) -> None:
    """No more cells: it ends by itself, whatever it does; or is ended."""
    assert worker.stdin is not None
    worker.stdin.close()
    try:
        async with asyncio.timeout(LEAVE_S):
            await worker.wait()
    except TimeoutError:
        worker.kill()
        await worker.wait()


def say(line: str) -> None:
    """To people: standard output may be JSON."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main() -> None:
    """A worker, until its standard input ends: also in the middle of a cell, for then nobody wants the answer."""
    play = importlib.import_module(sys.argv[1]).play
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever is printed meanwhile is no answer
    folder = Path(tempfile.mkdtemp(prefix="astraflow-cells-"))
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines, folder), daemon=True).start()
    for number in itertools.count():
        cell = json.loads(lines.get())  # or the end of this process, by the listener
        own = folder / str(number)
        own.mkdir()
        answers.write(json.dumps(play(cell, own)) + "\n")
        answers.flush()
        shutil.rmtree(own)


def _listen(lines: queue.SimpleQueue[str], folder: Path) -> None:
    for line in sys.stdin:
        lines.put(line)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
