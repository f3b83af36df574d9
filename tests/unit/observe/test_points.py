"""Named points: nothing without the variable, SIGKILL at the named one, one taker of an order."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from astraflow.observe import points

WALK = """
from astraflow.observe.points import reach
for n in range(4):
    reach("trainer.before_commit")
    print(n, flush=True)
    reach("trainer.after_commit")
"""


def walk(chaos: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != points.ENVIRONMENT}
    if chaos is not None:
        environment[points.ENVIRONMENT] = chaos
    return subprocess.run(
        [sys.executable, "-c", WALK], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_without_the_variable_nothing_happens() -> None:
    done = walk(None)
    assert (done.returncode, done.stdout.split()) == (0, ["0", "1", "2", "3"])


@pytest.mark.parametrize(
    ("chaos", "seen"),
    [("trainer.before_commit:3", ["0", "1"]), ("trainer.after_commit", ["0"]), ("trainer.before_publish:1", None)],
)
def test_killed_at_the_named_point_the_nth_time(chaos: str, seen: list[str] | None) -> None:
    done = walk(chaos)
    if seen is None:
        assert done.returncode == 0
    else:
        assert (done.returncode, done.stdout.split()) == (-signal.SIGKILL, seen)


def test_an_order_is_taken_once(tmp_path: Path) -> None:
    """The second process that gets to the point finds no order and lives."""
    taken = points.give_order(tmp_path, "trainer.after_commit")
    first, second = walk(str(tmp_path)), walk(str(tmp_path))
    assert (first.returncode, first.stdout.split()) == (-signal.SIGKILL, ["0"])
    assert second.returncode == 0
    assert taken == tmp_path / "trainer.after_commit.taken"
    assert set(json.loads(taken.read_text())) == {"pid", "at"}


def test_an_order_that_only_stops_lets_the_process_go_on_from_there(tmp_path: Path) -> None:
    taken = points.give_order(tmp_path, "trainer.after_commit", only_stop=True)
    environment = {**os.environ, points.ENVIRONMENT: str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", WALK], env=environment, stdout=subprocess.PIPE, text=True) as walker:
        pid, status = os.waitpid(walker.pid, os.WUNTRACED)
        assert pid == walker.pid and os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP
        assert json.loads(taken.read_text())["pid"] == pid
        assert sorted(path.name for path in tmp_path.iterdir()) == [taken.name]
        os.kill(pid, signal.SIGCONT)
        assert walker.communicate(timeout=60)[0].split() == ["0", "1", "2", "3"]
        assert walker.returncode == 0


def test_every_point_is_in_the_code_and_listed(repo: Path) -> None:
    sources = [path.read_text() for path in (repo / "src/astraflow").rglob("*.py")]
    found = {name for text in sources for name in re.findall(r'\breach\("([\w.]+)"\)', text)}
    assert found == {name for names in points.POINTS.values() for name in names}
