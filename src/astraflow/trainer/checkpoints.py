"""Checkpoints in a folder: complete or absent, verified before use, the newest k kept.

checkpoints/step-00000020/          20 optimiser steps: these weights are version 20
    …                               the backend's files, which hold ``extra``
    trained.jsonl                   one line a step: {"step", "batch", "trained": [[sample_id, use], …]}
    complete.json                   size and xxh3-128 of every file; written last
checkpoints/owner.json              {"run", "trainer_epoch"} of who registered last: nobody older writes here any more
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from astraflow.errors import ConfigError, Fenced, TimedOut
from astraflow.observe.points import reach
from astraflow.trainer.scratch import EXPORT, PARTIAL, Scratch, lock

COMPLETE = "complete.json"
OWNER, LOCK = "owner.json", ".lock"
LOCK_S = 60.0
"""For another process to end what it writes: a rename, and removing what is older."""
LOOK_S = 0.05
TRAINED = "trained.jsonl"
CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedStep:
    """What one optimiser step took in: the data position, and the proof that nothing was trained twice."""

    step: int
    """From 1; it made version ``step``."""
    batch: int
    trained: tuple[tuple[str, int], ...]
    """(sample_id, use)"""


class Checkpoints:
    """The checkpoint folder of one policy. One writer: who claimed it last."""

    def __init__(self, folder: Path, *, kept: int) -> None:
        self.folder = folder
        self._kept = kept
        self._own: tuple[str, int] | None = None
        self._scratch = Scratch(folder)

    def claim(self, run: str, trainer_epoch: int) -> None:
        """For a process that dataflow has registered. One that was stopped and comes back later must not write its own
        history over this one's, nor remove what is newer. Raises Fenced if it is itself the older one."""
        self._own = (run, trainer_epoch)
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._alone():
            self._require_own()
            part = self.folder / f".{OWNER}.part"
            part.write_text(json.dumps({"run": run, "trainer_epoch": trainer_epoch}), encoding="utf-8")
            _sync(part)
            part.replace(self.folder / OWNER)
            _sync(self.folder)

    def write(self, version: int, write: Callable[[Path], None], trained: Sequence[TrainedStep]) -> Path:
        """``write`` fills a folder; it becomes the checkpoint of ``version`` by one rename, after everything is on
        disk. Killed before that, nothing has changed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self.folder / _name(version)
        partial = self._scratch.make(PARTIAL)
        try:
            self._fill(partial, version, write, trained)
            reach("trainer.in_checkpoint")
            with self._alone():
                self._require_own()
                self._keep(partial, target, version)
        except Exception:
            shutil.rmtree(partial, ignore_errors=True)  # on a full disk it would take the space that is waited for
            raise
        return target

    def _keep(self, partial: Path, target: Path, version: int) -> None:
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
        _sync(self.folder)
        undone = [each for each in self._found() if each > version]  # newer ones are of a history that was undone
        older = [each for each in self._found() if each <= version][self._kept :]
        for each in (*undone, *older):
            shutil.rmtree(self.folder / _name(each))

    def _require_own(self) -> None:
        """Raises Fenced if a newer process of this run has claimed the folder."""
        path = self.folder / OWNER
        if self._own is None or not path.exists():
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            owner = (str(found["run"]), int(found["trainer_epoch"]))
        except (ValueError, KeyError, TypeError):
            return  # torn: whoever claimed it is gone with its machine
        if owner[0] == self._own[0] and owner[1] > self._own[1]:
            raise Fenced(
                f"checkpoints in {self.folder} are written by trainer epoch {owner[1]} now, this process has "
                f"{self._own[1]}: it was replaced"
            )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process changes the folder. Raises TimedOut."""
        deadline = time.monotonic() + LOCK_S
        with (self.folder / LOCK).open("ab") as file:
            while not lock(file):
                if time.monotonic() >= deadline:
                    raise TimedOut(f"another process holds {file.name} for {LOCK_S:g} s: find it by 'fuser' and end it")
                time.sleep(LOOK_S)  # flock alone waits for ever, and this is a thread of its own
            yield

    def _fill(self, partial: Path, version: int, write: Callable[[Path], None], trained: Sequence[TrainedStep]) -> None:
        write(partial)
        lines = [json.dumps({"step": s.step, "batch": s.batch, "trained": s.trained}) + "\n" for s in trained]
        (partial / TRAINED).write_text("".join(lines), encoding="utf-8")
        files = {p.name: {"bytes": p.stat().st_size, "xxh3": _hash(p)} for p in sorted(partial.iterdir())}
        (partial / COMPLETE).write_text(json.dumps({"version": version, "files": files}), encoding="utf-8")
        for path in (*partial.iterdir(), partial):
            _sync(path)

    def newest(self, say: Callable[[str], None] = lambda _: None) -> tuple[int, Path] | None:
        """The first of ``complete``."""
        return next(self.complete(say), None)

    def complete(self, say: Callable[[str], None] = lambda _: None) -> Iterator[tuple[int, Path]]:
        """(version, folder) of checkpoints whose every byte is as it was written, newest first, each checked when it
        is asked for. Others are reported to ``say`` and left alone."""
        for version in self._found():
            folder = self.folder / _name(version)
            wrong = find_damage(folder, version)
            if wrong is None:
                yield version, folder
            else:
                say(f"checkpoint {folder} is damaged ({wrong}); an older one is used")

    def oldest(self, newest: int) -> int | None:
        """Version of the oldest one in the history of checkpoint ``newest``: nobody goes further back than to that."""
        return min((version for version in self._found() if 0 < version <= newest), default=None)

    def _found(self) -> list[int]:
        """Versions, newest first."""
        names = [p.name for p in self.folder.glob("step-*") if p.is_dir()] if self.folder.exists() else []
        return sorted((int(name.removeprefix("step-")) for name in names if name[5:].isdigit()), reverse=True)

    def scratch(self) -> Path:
        """An empty folder on the same disk, for an export; the caller removes it, or a later ``clear_scratch``."""
        return self._scratch.make(EXPORT)

    def clear_scratch(self) -> None:
        """Remove what killed processes have left."""
        self._scratch.clear()


def read_trained(folder: Path) -> list[TrainedStep]:
    """The steps in a checkpoint's weights, in order."""
    lines = (folder / TRAINED).read_text(encoding="utf-8").splitlines()
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [
        TrainedStep(step=f["step"], batch=f["batch"], trained=tuple((name, use) for name, use in f["trained"]))
        for f in found
    ]


def find_damage(folder: Path, version: int) -> str | None:
    """What is wrong with a checkpoint, in words; None: nothing."""
    try:
        described: dict[str, Any] = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
        files: dict[str, dict[str, Any]] = described["files"]
        if described["version"] != version:
            return f"{COMPLETE} is of version {described['version']}"
        for name, expected in files.items():
            path = folder / name
            if not path.exists():
                return f"{name} is missing"
            if path.stat().st_size != expected["bytes"] or _hash(path) != expected["xxh3"]:
                return f"{name} is not what was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{COMPLETE} cannot be read: {type(error).__name__}"
    return None


def require_same_version(found: int, expected: int, folder: Path) -> None:
    if found != expected:
        raise ConfigError(f"checkpoint {folder} is of version {expected}, its weights say {found}")


def _name(version: int) -> str:
    return f"step-{version:08d}"


def _hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
