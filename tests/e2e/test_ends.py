"""A run fails, its tasks change, it goes on when told, it finishes, and then nothing can change it any more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import GOOD, Cli
from tests.e2e.test_run import check_ended

pytestmark = pytest.mark.slow


def contents(run: Path) -> dict[str, bytes]:
    files = [path for path in run.rglob("*") if path.is_file() and not path.name.endswith(("-shm", "-wal"))]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


@pytest.mark.parametrize("how", [("--in-process",), ()], ids=["in-process", "processes"])
def test_a_failed_run_goes_on_and_a_finished_one_stays(
    how: tuple[str, ...], cli: Cli, write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    run, salt, broken = tmp_path / "run", tmp_path / "salt", tmp_path / "broken"
    salt.write_text("one")
    broken.touch()
    body = f'if __import__("os").path.exists({str(broken)!r}):\n        raise OSError("the disk of the sandbox")\n    '
    recipe = write_recipe(body + GOOD, change=('f"e2e/{index}"', f'open({str(salt)!r}).read() + f"/{{index}}"'))

    failed = cli("run", recipe, "--run-dir", run, *how, "--set", "steps=3", "limits.first_failures=3")
    assert failed.returncode == 1, failed.stderr[-2000:]
    assert "OSError: the disk of the sandbox" in failed.stderr

    salt.write_text("two")
    before = contents(run)
    refused = cli("resume", run, *how)
    assert refused.returncode == 2
    assert "was started with other tasks" in refused.stderr and "--allow-changed-tasks" in refused.stderr
    assert contents(run) == before

    broken.unlink()
    done = cli("resume", run, *how, "--allow-changed-tasks")
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-1000:]
    check_ended(run, steps=3)

    before = contents(run)
    again = cli("resume", run, *how)
    assert (again.returncode, again.stderr) == (0, "")
    assert "has finished its 3 steps: there is nothing to go on with" in again.stdout
    assert contents(run) == before
