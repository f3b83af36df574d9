"""Checkpoints: complete or absent, torn ones noticed at any file, k kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from astraflow.errors import ConfigError, Fenced, TimedOut
from astraflow.trainer import checkpoints as module
from astraflow.trainer.checkpoints import (
    COMPLETE,
    LOCK,
    OWNER,
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
    del checkpoints  # its process ends
    Checkpoints(tmp_path, kept=2).clear_scratch()
    assert sorted(p.name for p in tmp_path.iterdir()) == [LOCK, "step-00000002", "step-00000003"]


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


# ── who writes ──


def claimed(folder: Path, epoch: int, *, run: str = "r") -> Checkpoints:
    made = Checkpoints(folder, kept=2)
    made.claim(run, epoch)
    return made


def test_a_process_that_was_stopped_and_replaced_writes_and_removes_nothing(tmp_path: Path) -> None:
    """Between its commit and its checkpoint it was stopped; its successor has gone on from an older one meanwhile."""
    zombie = claimed(tmp_path, 1)
    zombie.write(4, fill, STEPS)
    successor = claimed(tmp_path, 2)
    for version in (5, 6):
        successor.write(version, fill, STEPS)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(Fenced, match="are written by trainer epoch 2 now, this process has 1: it was replaced"):
        zombie.write(5, lambda folder: (folder / "of the undone history").touch(), STEPS)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert [version for version, _ in successor.complete()] == [6, 5]


def test_who_registered_first_and_claims_last_is_the_older_one(tmp_path: Path) -> None:
    claimed(tmp_path, 7)
    with pytest.raises(Fenced, match="trainer epoch 7 now, this process has 6"):
        claimed(tmp_path, 6)
    claimed(tmp_path, 7).write(1, fill, STEPS)


def test_another_run_in_an_old_folder_counts_its_own_epochs(tmp_path: Path) -> None:
    claimed(tmp_path, 9).write(3, fill, STEPS)
    claimed(tmp_path, 1, run="another").write(1, fill, STEPS)
    assert [version for version, _ in Checkpoints(tmp_path, kept=2).complete()] == [1]


@pytest.mark.parametrize("torn", [b"", b"{", b"[]", b'{"run": "r"}', b'{"run": "r", "trainer_epoch": "x"}'])
def test_a_torn_owner_is_nobody(tmp_path: Path, torn: bytes) -> None:
    claimed(tmp_path, 2)
    (tmp_path / OWNER).write_bytes(torn)
    claimed(tmp_path, 1).write(1, fill, STEPS)


def test_who_is_stopped_while_it_writes_is_waited_for_by_name_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = claimed(tmp_path, 1)
    monkeypatch.setattr(module, "LOCK_S", 0.1)
    with held._alone(), pytest.raises(TimedOut, match=r"another process holds .*lock for 0\.1 s: find it by 'fuser'"):
        claimed(tmp_path, 2)
    claimed(tmp_path, 2)
