"""A run over several hosts: dataflow and trainers at home, workers in regions behind their lines. Real processes.

with Hosts() as hosts, Regions(hosts, Path("recipe.py"), Path("runs/r")) as run:
    run.begin()
    run.worker("eu-0", hosts.add("eu", Line(rtt_s=0.3)))
    run.wait(120.0)
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from astraflow.dataflow.components import ROLLOUT
from astraflow.errors import RunFailed, TimedOut
from astraflow.testing.hosts import Host, Hosts
from astraflow.wire.codec import decode
from astraflow.wire.messages import ComponentReport

PORT = 7700
"""Of dataflow: every host has ports of its own."""
LIFELINE = "ASTRAFLOW_LIFELINE"
"""As the launcher, whose layer is above, calls it (``run/child.py``)."""
START_S = 600.0
"""Until a process is there that has to be loaded first: a busy machine takes its time."""
ASK_S = 60.0
LOOK_S = 0.1
END_S = 30.0


class Regions:
    """A context: outside of it no process is left."""

    def __init__(
        self,
        hosts: Hosts,
        recipe: Path,
        folder: Path,
        *,
        given: Sequence[str] = (),
        environment: Mapping[str, str] = {},
    ) -> None:
        """``given``: words that every process of the run gets, such as ``--set steps=3``."""
        self._hosts = hosts
        self._recipe = recipe.resolve()
        self.run_dir = folder.resolve() / "run"
        self._logs = folder.resolve()
        self._given = tuple(given)
        own = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", LIFELINE: "1"}
        self._environment = {**os.environ, **own, **environment}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Regions:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + END_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            process.stdin.close()

    def begin(self) -> None:
        """Dataflow and, once that listens, a trainer for each policy that is trained."""
        home = self._hosts.home
        self._start("dataflow", home, "dataflow", "--run-dir", self.run_dir, "--host", "0.0.0.0", "--port", PORT)
        self._until("dataflow listens", lambda: (self.run_dir / "endpoint.json").exists(), START_S)
        for policy, token in self._tokens()["trainers"].items():
            self._start(f"trainer-{policy}", home, "trainer", "--dataflow", f"http://127.0.0.1:{PORT}",
                        "--policy", policy, token=token)  # fmt: skip

    def worker(self, name: str, host: Host, *words: str, environment: Mapping[str, str] = {}) -> None:
        """A rollout service on that host, of the region of its name; ``words`` as for ``astraflow rollout``."""
        url = f"http://{host.home_address}:{PORT}"
        self._start(name, host, "rollout", "--dataflow", url, "--name", name, "--region", host.name, *words,
                    token=self._tokens()["worker"], environment=environment)  # fmt: skip

    def meet(self, *names: str) -> None:
        """Until these workers serve a version each, so that who is started later is not there before them. Raises
        TimedOut, or RunFailed if a process fails or the run ends without them."""
        what = f"{', '.join(names)} serve"

        def there() -> bool:
            found = set(names) <= self._serving()
            if not found and self._has_ended():
                raise RunFailed(f"{what}: the run ended before; it needs more steps on this machine")
            return found

        self._until(what, there, START_S)

    def ask(self, *words: str) -> str:
        """What ``astraflow`` says to that at home: ``run.ask("pool")``."""
        command = self._hosts.home.command([*_program(), words[0], str(self.run_dir), *words[1:]])
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=ASK_S, check=False
        )
        if done.returncode:
            raise RunFailed(f"astraflow {' '.join(words)} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        return done.stdout

    def version(self) -> int:
        """Of the policy that has the fewest."""
        with closing(self._database()) as database:
            return int(database.execute("SELECT MIN(version) FROM policies WHERE trainable").fetchone()[0])

    def played(self) -> dict[str, int]:
        """Episodes that were accepted so far, by worker."""
        asked = "SELECT worker, COUNT(*) FROM episodes WHERE state = 'done' GROUP BY worker ORDER BY worker"
        with closing(self._database()) as database:
            return dict(database.execute(asked).fetchall())

    def reach(self, version: int, seconds: float) -> None:
        """Until that version is there. Raises TimedOut, or RunFailed if a process fails."""
        self._until(f"version {version} of {self._recipe.name}", lambda: self.version() >= version, seconds)

    def wait(self, seconds: float) -> None:
        """Until the run has ended: its trainers have left. What is there still is ended with this context. Raises
        TimedOut, or RunFailed with the last words of a process that failed."""
        self._until("the run ends", self._has_ended, seconds)

    def _has_ended(self) -> bool:
        trainers = [process for name, process in self._processes.items() if name.startswith("trainer-")]
        return bool(trainers) and all(each.poll() is not None for each in trainers)

    def _serving(self) -> set[str]:
        with closing(self._database()) as database:
            rows = database.execute("SELECT name, report FROM components WHERE component = ?", (ROLLOUT,)).fetchall()
        return {name for name, report in rows if report and decode(report, ComponentReport).versions}

    def _database(self) -> sqlite3.Connection:
        """Read beside dataflow, which need not answer."""
        return sqlite3.connect(f"file:{self.run_dir / 'run.db'}?mode=ro", uri=True)

    def _until(self, what: str, over: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not over():
            self._require_no_failure()
            if time.monotonic() >= deadline:
                going_on = [name for name, process in self._processes.items() if process.poll() is None]
                raise TimedOut(f"{what}: not after {seconds:g} s; {', '.join(going_on)} go on, logs in {self._logs}")
            time.sleep(LOOK_S)
        self._require_no_failure()

    def _require_no_failure(self) -> None:
        for name, process in self._processes.items():
            if process.poll():
                raise RunFailed(f"{name} ended with {process.returncode}: {self._said(name)}")

    def _start(
        self, name: str, host: Host, verb: str, *words: object, token: str = "", environment: Mapping[str, str] = {}
    ) -> None:
        command = [*_program(), verb, str(self._recipe), *map(str, words), *self._given]
        place = self._logs / name  # a trainer that is nobody's child keeps its checkpoints where it was started
        place.mkdir(parents=True, exist_ok=True)
        with (self._logs / f"{name}.log").open("wb") as out:
            self._processes[name] = subprocess.Popen(
                host.command(command),
                cwd=place,
                env={**self._environment, **environment, **({"ASTRAFLOW_TOKEN": token} if token else {})},
                stdin=subprocess.PIPE,  # its lifeline: when this process dies, however it dies, so does that one
                stdout=out,
                stderr=out,
            )

    def _said(self, name: str) -> str:
        return (self._logs / f"{name}.log").read_text(errors="replace").strip()[-600:]

    def _tokens(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_dir / "tokens.json").read_text())
        return found


def _program() -> list[str]:
    return [sys.executable, "-m", "astraflow.run.cli"]
