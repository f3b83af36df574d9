"""A full disk under any of a trainer's writes: it waits by name, keeps what it trained, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astraflow.disk import SPACE_PATIENCE_S, is_full
from astraflow.errors import StorageFull
from astraflow.testing.virtual_clock import VirtualClock
from astraflow.testing.virtual_loop import run_virtual
from astraflow.wire import messages as m
from tests.unit.trainer.scripted import CountingBackend, Plug, ScriptedDataflow
from tests.unit.trainer.test_loop import make

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


class Full:
    """Raises at one place, so many times."""

    def __init__(self, at: str, error: Exception, times: int = 3) -> None:
        self.at, self.error, self.left = at, error, times

    def __call__(self, name: str) -> None:
        if name == self.at and self.left:
            self.left -= 1
            raise self.error


class Reporting(ScriptedDataflow):
    """Keeps what the trainer says of itself; some calls find the disk of dataflow full."""

    def __init__(self, full: Full, **more: Any) -> None:
        super().__init__(**more)
        self.full = full
        self.said: list[m.ComponentReport] = []

    async def report(self, request: m.ReportRequest) -> m.Done:
        if not request.leaving:
            self.said.append(request.report)
        self.full("report")
        return m.Done()

    async def commit(self, request: m.CommitRequest) -> m.CommitReply:
        self.full("commit")
        return await super().commit(request)

    async def batch(self, request: m.BatchRequest) -> m.BatchReply:
        self.full("batch")
        return await super().batch(request)

    async def resume(self, request: m.ResumeRequest) -> m.ResumeReply:
        self.full("resume")
        return await super().resume(request)


LIBRARY = RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("export", LIBRARY),
        ("export", NO_SPACE),
        ("publish", StorageFull("the weight store's disk is full")),
        ("commit", StorageFull("the disk of the run folder is full")),
        ("batch", StorageFull("the disk of the run folder is full")),
        ("resume", StorageFull("the disk of the run folder is full")),
        ("save", LIBRARY),
        ("save", NO_SPACE),
    ],
)
def test_a_full_disk_is_waited_for_by_name(tmp_path: Path, place: str, error: Exception) -> None:
    full = Full(place, error)
    said: list[str] = []
    dataflow, backend = Reporting(full, steps=4), CountingBackend(full)
    run_trainer(dataflow, backend, tmp_path, full, said.append)
    assert full.left == 0
    assert backend.version == 4 and [batch for batch, _ in dataflow.committed] == [1, 2, 3, 4]
    assert len(backend.trained) == len(set(backend.trained)), "no step was done twice"
    assert {report.doing for report in dataflow.said} == {"storage"}
    assert str(error) in dataflow.said[0].why
    assert [line for line in said if line.startswith("waits for space")] == [f"waits for space: {error}"]
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000002", "step-00000004"]


def run_trainer(dataflow: Any, backend: Any, folder: Path, plug: Any, say: Callable[[str], None]) -> None:
    async def main() -> None:
        clock = VirtualClock(asyncio.get_running_loop())
        await make(dataflow, folder, backend=backend, plug=plug, say=say, clock=clock).run()

    run_virtual(main)


def test_a_heartbeat_that_finds_no_space_ends_nothing(tmp_path: Path) -> None:
    full = Full("save", NO_SPACE, times=5)
    beats = Full("report", StorageFull("full"), times=4)
    dataflow = Reporting(beats, steps=2)
    run_trainer(dataflow, CountingBackend(full), tmp_path, full, lambda _: None)
    assert (full.left, beats.left) == (0, 0)


def test_patience_ends(tmp_path: Path) -> None:
    full = Full("save", NO_SPACE, times=10**6)
    dataflow = Reporting(full, steps=2)
    with pytest.raises(OSError, match="No space left"):
        run_trainer(dataflow, CountingBackend(full), tmp_path, full, lambda _: None)
    waited = dataflow.said[-1].since_s
    assert SPACE_PATIENCE_S - 5 <= waited <= SPACE_PATIENCE_S
    assert not [path for path in tmp_path.iterdir() if path.is_dir()], "nothing half-written"


def test_other_errors_are_not_waited_for(tmp_path: Path) -> None:
    broken = Full("save", PermissionError(errno.EACCES, "not yours"))
    with pytest.raises(PermissionError):
        run_trainer(Reporting(broken, steps=2), CountingBackend(broken), tmp_path, Plug(), lambda _: None)


def test_what_counts_as_a_full_disk() -> None:
    wrapped = ValueError("could not write")
    wrapped.__cause__ = NO_SPACE
    for error in (NO_SPACE, OSError(errno.EDQUOT, "quota"), StorageFull("x"), LIBRARY, wrapped):
        assert is_full(error)
    for other in (OSError(errno.EIO, "broken"), ValueError("x"), KeyError()):
        assert not is_full(other)
