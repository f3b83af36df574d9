"""What a process needs while it lives is left alone while it lives, and removed by whoever comes after its death."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from astraflow.trainer.scratch import ALIVE, EXPORT, PARTIAL, Scratch

HOLDS = """
import sys
from pathlib import Path
from astraflow.trainer.scratch import EXPORT, Scratch
scratch = Scratch(Path(sys.argv[1]))
(scratch.make(EXPORT) / "weights").write_bytes(b"w")
print("made", flush=True)
sys.stdin.read()
"""


def test_a_second_process_leaves_what_a_living_one_exports_and_removes_it_after_a_kill(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdin=-1, stdout=-1)
    assert process.stdout is not None and process.stdout.readline() == b"made\n"
    Scratch(tmp_path).clear()
    assert [path.name for path in tmp_path.glob(f"{EXPORT}*/*")] == ["weights"]
    process.kill()
    process.communicate()
    Scratch(tmp_path).clear()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_ends_by_itself_takes_its_mark_along(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdin=-1, stdout=-1)
    process.communicate()
    assert not list(tmp_path.glob(f"{ALIVE}*"))


def test_folders_of_no_known_process_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (f"{EXPORT}old", f"{PARTIAL}step-00000007", "step-00000004"):
        (tmp_path / name).mkdir()
    own = Scratch(tmp_path)
    made = own.make(PARTIAL)
    own.clear()
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {made.name, "step-00000004"}
    assert len(list(tmp_path.glob(f"{ALIVE}*"))) == 1


def test_a_mark_that_was_taken_for_a_dead_one_is_made_again(tmp_path: Path) -> None:
    """Between its making and its lock another process saw it."""
    scratch, steps = Scratch(tmp_path), 0
    true = scratch._mark

    def late() -> bool:
        nonlocal steps
        steps += 1
        return steps > 1 and true()

    scratch._mark = late  # type: ignore[method-assign]
    assert scratch.make(EXPORT).is_dir() and steps == 2
