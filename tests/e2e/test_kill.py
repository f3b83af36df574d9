"""``kill -9`` of each component, of the launcher; Ctrl-C; children that keep dying. The run ends all the same, or says
why; nothing is left running."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli
from tests.e2e.test_run import check_ended

pytestmark = pytest.mark.slow
STEPS = 150
DEADLINE_S = 120.0


def processes_of(run: Path) -> dict[int, str]:
    """Pid → verb of every living child of the run, found by its command line."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except OSError:  # it ended while we looked
            continue
        if "astraflow.run.cli" in words and str(run) in words:
            verb = words[words.index("astraflow.run.cli") + 1]
            if verb in ("dataflow", "rollout", "trainer"):
                found[int(entry.name)] = verb
    return found


def version_of(run: Path) -> int:
    if not (run / "run.db").exists():
        return -1
    db = sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True)
    try:
        row = db.execute("SELECT version FROM policies").fetchone()
        return -1 if row is None else int(row[0])
    except sqlite3.OperationalError:
        return -1
    finally:
        db.close()


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.02)


@contextmanager
def started(environment: dict[str, str], recipe: Path, run: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "astraflow.run.cli", "run", str(recipe), "--run-dir", str(run), *more]
    with (run.parent / "out.txt").open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, text=True, cwd=run.parent)
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            wait_for("children to go", lambda: not processes_of(run))


def output(run: Path) -> str:
    return (run.parent / "out.txt").read_text()


@pytest.mark.parametrize("victim", ["rollout", "trainer", "dataflow"])
def test_kill_9_of_a_component(
    environment: dict[str, str], write_recipe: Callable[..., Path], tmp_path: Path, victim: str
) -> None:
    run = tmp_path / "run"
    with started(environment, write_recipe(), run, "--set", f"steps={STEPS}") as process:
        wait_for("the tenth step", lambda: version_of(run) >= 10)
        (pid,) = [pid for pid, verb in processes_of(run).items() if verb == victim]
        os.kill(pid, signal.SIGKILL)
        assert process.wait(timeout=DEADLINE_S) == 0, output(run)[-3000:]
    assert "died with signal SIGKILL" in output(run)
    check_ended(run, steps=STEPS)
    assert not processes_of(run)


def test_kill_9_of_the_launcher_leaves_no_orphan_and_the_run_goes_on(
    environment: dict[str, str], cli: Cli, write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with started(environment, write_recipe(), run, "--set", f"steps={STEPS}") as process:
        wait_for("the tenth step", lambda: version_of(run) >= 10)
        assert sorted(processes_of(run).values()) == ["dataflow", "rollout", "trainer"]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_for("orphans to end", lambda: not processes_of(run))
    assert version_of(run) < STEPS
    done = cli("resume", run)
    assert done.returncode == 0, done.stderr[-2000:]
    check_ended(run, steps=STEPS)


def test_ctrl_c_stops_cleanly_and_the_run_goes_on(
    environment: dict[str, str], cli: Cli, write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with started(environment, write_recipe(), run, "--set", f"steps={STEPS}") as process:
        wait_for("the tenth step", lambda: version_of(run) >= 10)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=40) == 130
        assert not processes_of(run)
    assert f"astraflow resume {run}" in output(run)
    assert "Traceback" not in output(run)
    done = cli("resume", run)
    assert done.returncode == 0, done.stderr[-2000:]
    check_ended(run, steps=STEPS)


def test_ctrl_c_twice_stops_at_once(
    environment: dict[str, str], write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with started(environment, write_recipe(), run, "--set", f"steps={STEPS}") as process:
        wait_for("the tenth step", lambda: version_of(run) >= 10)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        wait_for("the first to be seen", lambda: "once more" in output(run))
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130
        assert time.monotonic() - began < 5
        assert not processes_of(run)


def test_three_quick_deaths_stop_the_run_with_the_last_error(
    cli: Cli, write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    """A loss that is not there is found by the trainer alone, as soon as it starts."""
    run = tmp_path / "run"
    body = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    done = cli("run", write_recipe(body), "--run-dir", run)
    assert done.returncode == 1
    assert "rollout-0 died 3 times in a row" in done.stderr
    assert "Traceback" not in done.stderr
    assert not processes_of(run)
