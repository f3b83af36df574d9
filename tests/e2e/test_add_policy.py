"""A run of real processes while a policy joins, is frozen, trained again, and gives its role to a past version and
takes it back: each by one call of the command line. Then all of it is killed, and goes on with the policy that joined.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow.conservation import balance
from astraflow.dataflow.local import LocalDataflow
from astraflow.dataflow.verify import verify
from astraflow.run.config import resolve
from astraflow.run.in_process import run_in_process
from astraflow.run.layout import RunFolder, write_json
from astraflow.run.prepare import create_run
from astraflow.run.run_db import RunDb, open_run_db
from astraflow.run.serve_dataflow import open_service
from astraflow.weights.store import DirStore
from astraflow.wire.messages import OperatorRequest, StatusReply
from tests.e2e.conftest import Cli
from tests.e2e.test_kill import processes_of
from tests.e2e.test_many_policies import RECIPE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
DEADLINE_S = 900.0

PAIR = """
import asyncio


async def pair(task: Task, agents: Agents) -> Reward:
    await asyncio.sleep(0.5)  # a tool: who changes the run finds the cores free
    answer = await agents["solver"].chat([{"role": "user", "content": task.key}])
    seen = await agents["referee"].chat([{"role": "user", "content": f"{task.key} {answer.text}"}])
    return Reward(solver=coin(task.key, answer.tokens), referee=coin(seen.tokens, task.key))


def recipe() -> Recipe:
    policies = {
        "main": policy(groups_per_batch=2, max_staleness=2, keep_every=2),
        "judge": policy(trainable=False),
    }
    return settings(policies=policies, roles={"solver": "main", "referee": "judge"}, workflow=pair, steps=100_000)
"""


class Live:
    """What is told of a run by its folder, and calls that change it."""

    def __init__(self, folder: Path, environment: dict[str, str], cli: Cli) -> None:
        self.folder, self.environment, self._cli = folder, environment, cli
        self.out = folder.parent / "out.txt"

    @contextmanager
    def played(self, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-m", "astraflow.run.cli", *map(str, arguments)]
        with self.out.open("a") as out:
            process = subprocess.Popen(
                command, env=self.environment, stdout=out, stderr=out, text=True, cwd=self.folder.parent
            )
            try:
                yield process
            finally:
                process.kill()
                process.wait()
                self.until("children to go", lambda: not processes_of(self.folder))

    def until(self, what: str, true: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not true():
            said = self.out.read_text()[-3000:]
            assert process is None or process.poll() is None, f"the run ended while waiting for {what}: {said}"
            assert time.monotonic() < deadline, f"timed out waiting for {what}: {said}"
            time.sleep(0.05)

    def call(self, verb: str, *arguments: str, code: int = 0) -> str:
        done = self._cli(verb, self.folder, *arguments, timeout=DEADLINE_S)
        assert done.returncode == code, f"{verb} {arguments}: {done.stdout[-1000:]}{done.stderr[-2000:]}"
        return done.stdout + done.stderr

    def rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        if not (self.folder / "run.db").exists():
            return []
        db = sqlite3.connect(f"file:{self.folder / 'run.db'}?mode=ro", uri=True)
        try:
            return db.execute(sql, values).fetchall()
        except sqlite3.OperationalError:  # its tables are not made yet
            return []
        finally:
            db.close()

    def version(self, policy: str) -> int:
        return int((self.rows("SELECT version FROM policies WHERE name = ?", policy) or [(-1,)])[0][0])

    def left(self, trainer: str) -> bool:
        return bool(self.rows("SELECT 1 FROM components WHERE name = ? AND state = 'left'", trainer))

    def played_by(self, policy: str, after: int) -> bool:
        """Whether somebody has played a group that was opened after ``after`` with ``policy`` as referee."""
        return bool(
            self.rows(
                "SELECT 1 FROM episodes e LEFT JOIN casts c ON c.group_id = e.group_id WHERE e.group_id > ? AND "
                "e.state = 'done' AND COALESCE(json_extract(c.roles, '$.referee'), 'judge') = ?",
                after,
                policy,
            )
        )

    def newest_group(self) -> int:
        return int(self.rows("SELECT MAX(id) FROM groups")[0][0])

    def goes_on(self, process: subprocess.Popen[str], *policies: str, steps: int = 2) -> None:
        wanted = {policy: self.version(policy) + steps for policy in policies}
        self.until(
            f"steps of {', '.join(policies)}",
            lambda: all(self.version(policy) >= version for policy, version in wanted.items()),
            process,
        )


def test_a_policy_joins_a_live_run_and_survives_its_death(
    environment: dict[str, str], cli: Cli, tmp_path: Path
) -> None:
    path, run = tmp_path / "pair.py", tmp_path / "run"
    path.write_text(RECIPE + PAIR)
    live = Live(run, environment, cli)
    with live.played("run", path, "--run-dir", run, "--set", "limits.retain=all") as process:
        live.until("version 3", lambda: live.version("main") >= 3, process)
        assert "late has joined, plays referee" in live.call(
            "add-policy", "late", "--source", "main@2", "--role", "referee"
        )
        live.goes_on(process, "main", "late")
        assert (run / "logs" / "trainer-late.log").exists() and "policy late has joined" in live.out.read_text()
        _rest_while_a_past_version_plays(live, process)
        pids = [process.pid, *processes_of(run)]
        assert len(pids) == 5, "launcher, dataflow, a worker, two trainers"
        for pid in pids:
            with suppress(ProcessLookupError):  # who finds its launcher dead ends by itself
                os.kill(pid, signal.SIGKILL)
    live.call("ledger", "--verify")
    with live.played("resume", run) as process:
        live.goes_on(process, "main", "late")
        for policy in ("late", "main"):
            live.call("freeze", policy)
        assert process.wait(timeout=DEADLINE_S) == 0, live.out.read_text()[-3000:]
    live.call("ledger", "--verify")
    assert json.loads((run / "summary.json").read_text())["ledger_difference"] == 0
    _every_sample_is_of_whom_it_says(RunFolder(run))


def _rest_while_a_past_version_plays(live: Live, process: subprocess.Popen[str]) -> None:
    live.call("freeze", "late")
    live.until("its trainer to leave", lambda: live.left("late"), process)
    frozen = live.version("late")
    live.call("swap", "judge", "--source", "main", "--version", "2")
    before = live.newest_group()
    live.call("cast", "referee", "judge")
    live.until("groups of the judge", lambda: live.played_by("judge", before), process)
    live.goes_on(process, "main")
    assert live.version("late") == frozen
    before = live.newest_group()
    live.call("swap", "judge", "--source", "main", "--version", "99999999", code=2)
    assert "late is frozen: 'astraflow unfreeze" in live.call("cast", "referee", "late")
    assert "late is trained again" in live.call("unfreeze", "late")
    assert "late is trained already" in live.call("unfreeze", "late")
    live.until("groups of late", lambda: live.played_by("late", before), process)
    live.goes_on(process, "main", "late")


def _every_sample_is_of_whom_it_says(run: RunFolder) -> None:
    with open_run_db(run.database) as db:
        digest_of = dict(db.connection.execute("SELECT policy || '@' || version, digest FROM publications").fetchall())
        assert digest_of["late@0"] == digest_of["judge@1"] == digest_of["main@2"], "the past version of main"
        seen = _whose_samples(db, run)
        trained = db.connection.execute("SELECT DISTINCT policy FROM samples WHERE state = 'trained'").fetchall()
    assert {("judge", 0), ("judge", 1), ("late", 0), ("main", 0)} <= seen
    assert {policy for policy, version in seen if version > 1} == {"late", "main"}, "both are followed as they learn"
    assert sorted(trained) == [("late",), ("main",)]


def _whose_samples(db: RunDb, run: RunFolder) -> set[tuple[str, int]]:
    """(policy, version) of all spans: each was published, and is of who was to play its role in that group."""
    known = set(db.connection.execute("SELECT policy, version, digest FROM publications").fetchall())
    casts = dict(db.connection.execute("SELECT group_id, roles FROM casts").fetchall())
    oldest = "SELECT policy, MIN(min_version) FROM samples WHERE group_id = ? AND idx = ? GROUP BY policy"
    seen = set()
    for group, idx in db.connection.execute("SELECT group_id, idx FROM episodes WHERE state = 'done'").fetchall():
        episode = db.episode(group, idx, run.payloads)
        assert episode is not None
        roles = json.loads(casts.get(group, '{"solver": "main", "referee": "judge"}'))
        assert {each.role: each.policy for each in episode.trajectories} == roles
        ages = dict(db.connection.execute(oldest, (group, idx)).fetchall())
        for each in episode.trajectories:
            spans = {(each.policy, span.version, span.digest) for sample in each.samples for span in sample.spans}
            assert spans and spans <= known
            oldest_version = min(version for _, version, _ in spans)
            assert ages.get(each.policy, oldest_version) == oldest_version, "of who is trained the ledger tells the age"
            seen |= {(policy, version) for policy, version, _ in spans}
    return seen


def test_a_run_in_one_process_has_who_joined_before(tmp_path: Path) -> None:
    """And nobody looks for a dataflow where an earlier one listened."""
    path = tmp_path / "pair.py"
    path.write_text(RECIPE + PAIR)
    resolved = resolve(str(path), ["steps=3", "limits.retain=all"], 0)
    run = create_run(resolved, tmp_path / "run")

    async def main() -> StatusReply:
        async with open_service(run, resolved, DirStore(run.weights)) as service:
            joins = OperatorRequest(action="add", policy="late", source="main", version=0, role="referee")
            await LocalDataflow(service).operate(joins)
        write_json(run.endpoint, {"url": "http://127.0.0.1:9", "pid": 1})
        return await run_in_process(run, resolved, watch=lambda _: None)

    last = asyncio.run(main())
    assert not run.endpoint.exists()
    assert {each.policy: each.version for each in last.policies} == {"main": 3, "late": 3, "judge": 0}
    with open_run_db(run.database) as db:
        assert balance(db.connection)["difference"] == 0
        assert not verify(db.connection).differences
        # Groups that were opened before it joined are played by whom they were opened for.
        assert {"main", "late"} <= {policy for policy, _ in _whose_samples(db, run)} <= {"main", "late", "judge"}
