"""What cannot begin is refused in one sentence, before a folder is made or anything is said of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from astraflow.dataflow.store import is_held, lock_run
from astraflow.run.cli import main

TINY = "examples/tiny.py"


@pytest.mark.parametrize("port", ["-1", "65536", "99999"])
@pytest.mark.parametrize("verb", ["run", "dataflow"])
def test_a_port_that_there_is_not(verb: str, port: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [verb, TINY, f"--port={port}", "--run-dir", str(tmp_path / "run")]
    assert main(words) == 2
    said = capsys.readouterr()
    assert f"a port is between 0 (any free one) and 65535, found {port}" in said.err and said.out == ""
    assert not (tmp_path / "run").exists()


def test_a_resume_of_a_run_that_somebody_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from astraflow.run.config import resolve
    from astraflow.run.prepare import create_run

    monkeypatch.setenv("ASTRAFLOW_CACHE", str(tmp_path / "cache"))
    run = create_run(resolve(TINY), tmp_path / "run")
    before = sorted((path, path.stat().st_mtime_ns) for path in run.path.rglob("*"))
    with lock_run(run.path):
        before = sorted((path, path.stat().st_mtime_ns) for path in run.path.rglob("*"))
        assert main(["resume", str(run.path)]) != 0
        assert sorted((path, path.stat().st_mtime_ns) for path in run.path.rglob("*")) == before
    said = capsys.readouterr()
    assert f"another dataflow serves {run.path}: stop it first" in said.err and "goes on" not in said.out


def test_who_asks_whether_a_run_is_held_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataflow that starts just then must not take the question for another dataflow."""
    assert not is_held(tmp_path)
    assert not list(tmp_path.iterdir()), "no lock is made by asking"
    with lock_run(tmp_path):
        assert is_held(tmp_path)
    taken: list[object] = []
    monkeypatch.setattr("astraflow.dataflow.store.fcntl.flock", lambda *arguments: taken.append(arguments))
    assert not is_held(tmp_path)
    assert not taken
    monkeypatch.setattr("astraflow.dataflow.store.LISTED", tmp_path / "none")
    assert not is_held(tmp_path)
