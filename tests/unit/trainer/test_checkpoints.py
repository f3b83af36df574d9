"""Checkpoints: complete or absent, torn ones noticed at any file, k kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from astraflow.errors import ConfigError
from astraflow.trainer.checkpoints import (
    COMPLETE,
    TRAINED,
    Checkpoints,
    TrainedStep,
    find_damage,
    read_trained,
    require_same_version,
)

FILES = {"master.safetensors": b"m" * 5000, "moment1.safetensors": b"1" * 5000, "state.json": b"{}"}
STEPS = [TrainedStep(step=1, batch=7, trained=(("7/0/a/0", 0), ("7/1/a/0", 1)))]


def fill(folder: Path) -> None:
    for name, data in FILES.items():
        (folder / name).write_bytes(data)


def two(folder: Path) -> Checkpoints:
    checkpoints = Checkpoints(folder, kept=2)
    checkpoints.write(1, fill, STEPS)
    checkpoints.write(2, fill, STEPS)
    return checkpoints


def test_what_was_written_is_found_and_read(tmp_path: Path) -> None:
    found = two(tmp_path).newest()
    assert found == (2, tmp_path / "step-00000002")
    assert read_trained(found[1]) == STEPS


def test_nothing_there(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "absent", kept=1).newest() is None


@pytest.mark.parametrize("name", [*FILES, TRAINED, COMPLETE])
@pytest.mark.parametrize("how", ["missing", "empty", "short", "flipped"])
def test_damage_to_any_file_goes_back_to_the_older_one(tmp_path: Path, name: str, how: str) -> None:
    checkpoints = two(tmp_path)
    path = tmp_path / "step-00000002" / name
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "short":
        path.write_bytes(data[:-1])
    else:
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    said: list[str] = []
    assert checkpoints.newest(said.append) == (1, tmp_path / "step-00000001")
    assert len(said) == 1 and "step-00000002 is damaged" in said[0]


def test_killed_while_writing_leaves_the_older_one(tmp_path: Path) -> None:
    checkpoints = two(tmp_path)

    def killed(folder: Path) -> None:
        (folder / "master.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.write(3, killed, STEPS)
    assert checkpoints.newest() == (2, tmp_path / "step-00000002")
    checkpoints.write(3, fill, STEPS)
    assert checkpoints.newest() == (3, tmp_path / "step-00000003")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_the_newest_k_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, kept=3)
    for version in range(1, 13):
        checkpoints.write(version, fill, [])
    assert [version for version, _ in checkpoints.complete()] == [12, 11, 10]


def test_the_oldest_is_of_the_history_that_goes_on(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, kept=3)
    assert checkpoints.oldest(9) is None
    for version in (3, 6, 9):
        checkpoints.write(version, fill, [])
    assert checkpoints.oldest(9) == 3
    assert checkpoints.oldest(6) == 3, "6 was resumed at: 9 is of a history that was left"
    assert checkpoints.oldest(-1) is None, "begun anew: none of these leads to its weights"


def test_an_undone_history_is_overwritten(tmp_path: Path) -> None:
    """After a step back, checkpoints with higher numbers are of a history that no longer exists."""
    checkpoints = Checkpoints(tmp_path, kept=1)
    checkpoints.write(6, fill, STEPS)
    checkpoints.write(4, fill, STEPS)
    assert [version for version, _ in checkpoints.complete()] == [4]
    checkpoints.write(4, lambda folder: (folder / "other").touch(), STEPS)
    assert (tmp_path / "step-00000004" / "other").exists()


def test_a_folder_of_another_version_is_noticed(tmp_path: Path) -> None:
    two(tmp_path)
    assert find_damage(tmp_path / "step-00000002", 3) == "complete.json is of version 2"
    with pytest.raises(ConfigError, match="is of version 2, its weights say 3"):
        require_same_version(3, 2, tmp_path)


def test_other_names_in_the_folder_do_no_harm(tmp_path: Path) -> None:
    checkpoints = two(tmp_path)
    (tmp_path / "step-notes").mkdir()
    (tmp_path / ".export-abc").mkdir()
    (tmp_path / "step-00000009").write_text("a file")
    assert checkpoints.newest() == (2, tmp_path / "step-00000002")
