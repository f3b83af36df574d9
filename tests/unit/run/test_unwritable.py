"""Disks that are full or may not be written: the path, what to do, an exit code that is not 0, nothing half-written."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from astraflow.disk import absent_if_raises, refusal, writing
from astraflow.errors import ConfigError, NotFound, StorageFull
from astraflow.observe.curve import save_curve
from astraflow.run.cli import main
from astraflow.run.config import resolve
from astraflow.run.export import export_version
from astraflow.run.layout import RunFolder, read_json, write_json
from astraflow.run.prepare import create_run
from astraflow.run.tiny_model import TinyModel
from tests.unit.run.made_run import MadeRun

RECIPE = """
from astraflow.rollout.workflow import Reward
from astraflow.run.recipe import Policy, Recipe
from astraflow.run.tiny_model import TinyModel
from astraflow.tasks.generated import GeneratedTasks
from astraflow.types import Task


async def play(task, agents):
    return Reward(1.0)


def recipe():
    tasks = GeneratedTasks("x", lambda index: Task(key=str(index)))
    return Recipe(name="r", policies={"main": Policy(model=MODEL)}, workflow=play, tasks=tasks)
"""
FULL = OSError(errno.ENOSPC, "No space left on device")


def contents(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (FULL, StorageFull, "x cannot be written: its disk is full; make room there, or name another"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), StorageFull, "x cannot be written: its disk is full; make room"),
        (
            StorageFull("the weight store's disk is full"),
            StorageFull,
            "x cannot be written: its disk is full; make room",
        ),
        (StorageFull("y cannot be written: its disk is full"), StorageFull, "y cannot be written: its disk is full"),
        (RuntimeError("No space left on device (os error 28)"), StorageFull, "its disk is full; make room there, or"),
        (
            PermissionError(errno.EACCES, "Permission denied", "x"),
            ConfigError,
            "x cannot be written: Permission denied; na",
        ),
        (
            OSError(errno.EROFS, "Read-only file system", "x/y"),
            ConfigError,
            "x cannot be written: Read-only file system (x/y)",
        ),
    ],
)
def test_an_error_of_the_disk_says_where_and_what_to_do(error: Exception, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as caught, writing(Path("x"), "name another"):
        raise error
    assert words in str(caught.value)


@pytest.mark.parametrize("error", [KeyError("x"), NotFound("x"), ConnectionResetError(104, "reset"), TimeoutError()])
def test_others_pass_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, writing(Path("x"), "name another"):
        raise error
    assert caught.value is error and (isinstance(error, NotFound) or refusal("x", error) is None)


def test_nothing_is_left_of_what_could_not_be_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    for path in (file, folder, tmp_path / "absent"):
        with pytest.raises(KeyError), absent_if_raises(path):
            file.write_text("half")
            folder.mkdir(exist_ok=True)
            (folder / "half").write_text("half")
            raise KeyError
    monkeypatch.setattr("astraflow.run.layout.os.fsync", raises_full)
    write_json_before = contents(tmp_path)
    with pytest.raises(StorageFull, match=r"x\.json cannot be written: its disk is full; make room there$"):
        write_json(tmp_path / "x.json", {})
    assert contents(tmp_path) == write_json_before
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", half_written)
    with pytest.raises(StorageFull, match=r"curve\.png cannot be written: its disk is full"):
        save_curve(tmp_path / "curve.png", {}, title="x")
    assert contents(tmp_path) == write_json_before


def raises_full(*_: Any, **__: Any) -> Any:
    raise FULL


def half_written(self: Any, path: Path, **_: Any) -> None:
    Path(path).write_bytes(b"half")
    raise FULL


@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_that_could_not_be_written_leaves_its_folder_as_it_was(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of one's own, for example a small disk that is mounted there, is emptied again, and no more."""
    source = tmp_path / "mine.py"
    source.write_text(RECIPE.replace("MODEL", "TinyModel()"))
    resolved = resolve(str(source))
    folder = tmp_path / "run"
    if is_there:
        folder.mkdir()
        (folder / "notes.txt").write_text("keep me")

    async def copies_half(run: RunFolder, *_: Any) -> None:
        (run.weights / "half").write_bytes(b"half")
        raise FULL

    monkeypatch.setattr("astraflow.run.prepare.publish_initial", copies_half)
    words = f"{folder} cannot be written: its disk is full; make room there, or name another folder by --run-dir"
    with pytest.raises(StorageFull, match=words):
        create_run(resolved, folder)
    assert (contents(folder) == ["notes.txt"]) if is_there else not folder.exists()


def test_a_model_that_could_not_be_built_names_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: TinyModel, folder: Path) -> None:
        (folder / "half").write_bytes(b"half")
        raise FULL

    monkeypatch.setattr(TinyModel, "_write", write)
    monkeypatch.setenv("ASTRAFLOW_CACHE", str(tmp_path))
    with pytest.raises(
        StorageFull, match=f"{tmp_path}/tiny-.* full; make room there, or set ASTRAFLOW_CACHE to another"
    ):
        TinyModel().build()
    assert contents(tmp_path) == []


def test_an_export_to_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = MadeRun(tmp_path / "run").healthy().close()
    monkeypatch.setattr("astraflow.run.run_db.RunDb.manifest", lambda *_: None)
    for target in (Path("/proc/x"), Path("/proc/x/y")):
        with pytest.raises(ConfigError, match=f"{target} cannot be written: .*; name another folder"):
            export_version(run, None, policy="main", version=None, target=target)  # type: ignore[arg-type]
    monkeypatch.setattr("astraflow.run.export._fetch", raises_full)
    recipe: Any = type("R", (), {"store": ""})
    with pytest.raises(StorageFull, match="out cannot be written: its disk is full; make room there, or name another"):
        export_version(run, recipe, policy="main", version=None, target=tmp_path / "out")
    assert [name for name in contents(tmp_path) if "/" not in name] == ["run"]


def test_a_run_folder_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "mine.py"
    source.write_text(RECIPE.replace("MODEL", "TinyModel()"))
    for verb in ("run", "dataflow"):
        assert main([verb, str(source), "--run-dir", "/proc/x"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("astraflow: /proc/x cannot be written: ") and "name another folder by --run-dir" in err


def test_an_error_of_the_system_that_nobody_foresaw(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = {
        "somewhere: Permission denied; it must be there, and this user must be able to use it": PermissionError(
            errno.EACCES, "Permission denied", "somewhere"
        ),
        "somewhere cannot be written: its disk is full; make room there": OSError(
            errno.ENOSPC, "No space", "somewhere"
        ),
        "make room on the disks that this command writes to": FULL,
    }
    for words, error in cases.items():
        monkeypatch.setattr("astraflow.run.cli._dispatch", lambda _, error=error: (_ for _ in ()).throw(error))
        assert main(["status"]) == 1
        assert words in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="of Linux")
def test_a_standard_output_that_is_full_is_named() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "astraflow.run.cli", "--help"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 1
    assert (
        done.stderr
        == b"astraflow: standard output cannot be written: its disk is full; make room there, or lead it elsewhere\n"
    )


def test_what_was_written_whole_is_read_again(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": [1]})
    assert read_json(tmp_path / "x.json") == {"a": [1]} and contents(tmp_path) == ["x.json"]
