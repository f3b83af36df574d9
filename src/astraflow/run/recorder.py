"""Writes what happened into metrics.jsonl and trace.jsonl, from the database alone: whatever dies, nothing is missing.

It runs in dataflow's process, looks a few times a second, and remembers nothing that its own files do not say.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from astraflow.disk import is_full
from astraflow.observe.metrics_file import MetricsFile, read_points
from astraflow.run.layout import RunFolder
from astraflow.run.run_db import RunDb, open_run_db

LOOK_S = 0.5
Sink = Any
"""TensorBoard's SummaryWriter, if asked for."""


class Recorder:
    """``look`` as often as you like: each event and point is written once, also after a restart."""

    def __init__(self, run: RunFolder, *, tensorboard: bool = False) -> None:
        self._run = run
        self._open()
        self._board: Sink = _summary_writer(run.path / "tensorboard") if tensorboard else None

    def _open(self) -> None:
        run = self._run
        self._last = last_event(run.trace)
        self._trace = run.trace.open("a", encoding="utf-8")
        self._written = {(p.kind, p.policy, p.x, p.about.get("batch", p.about.get("digest"))) for p in _alive(run)}
        self._metrics = MetricsFile(run.metrics)
        self._until_s = 0.0
        """Of the newest step that was looked at: a later one is not committed earlier."""
        self._torn = False
        """A write found the disk full: the files are opened again, from what is in them."""

    async def follow(self) -> None:
        """Until cancelled; looks a last time then."""
        try:
            while True:
                await asyncio.to_thread(self.look_if_room)
                await asyncio.sleep(LOOK_S)
        finally:
            self.look_if_room()

    def look_if_room(self) -> bool:
        """``look``; False if the disk is full: whatever is missing then is written once there is room again."""
        try:
            if self._torn:
                self._open()
            self.look()
        except (OSError, sqlite3.OperationalError) as error:
            if not is_full(error):
                raise
            self._torn = True
            for file in (self._trace, self._metrics):
                with contextlib.suppress(OSError):  # closing writes what is left, which has no room either
                    file.close()
            return False
        return True

    def look(self) -> None:
        if not self._run.database.exists():
            return
        with open_run_db(self._run.database) as db:
            for event in _new_events(db, self._last):
                self._trace.write(json.dumps(event) + "\n")
                self._last = event["id"]
                if event["kind"] == "undone":
                    self._undo(event["policy"], event["batch"])
            self._trace.flush()
            self._steps(db)
            self._evaluations(db)

    def close(self) -> None:
        for file in (self._trace, self._metrics):
            with contextlib.suppress(OSError):
                file.close()
        if self._board is not None:
            self._board.close()

    def _undo(self, policy: str, batch: int) -> None:
        """This step and those above it are of an older history from here on (F108)."""
        steps = [x for kind, name, x, made_of in self._written if (kind, name, made_of) == ("step", policy, batch)]
        if steps:
            self._metrics.resume(policy, steps[0] - 1)
            self._written = {key for key in self._written if not (key[1] == policy and key[2] >= steps[0])}

    def _steps(self, db: RunDb) -> None:
        for step in db.steps(self._until_s):
            self._until_s = step.at_s
            key = ("step", step.policy, step.step, step.batch)
            if key in self._written:
                continue
            self._written.add(key)
            metrics = dict(step.metrics)
            if step.reward is not None:
                metrics |= {"reward/train": step.reward, "episode/ended": float(step.episodes)}
            self._metrics.step(step.policy, step.step, metrics, at_s=step.at_s, batch=step.batch)
            self._show(step.policy, metrics, step.step)

    def _evaluations(self, db: RunDb) -> None:
        for found in db.evaluations():
            key = ("eval", found.policy, found.version, found.digest)
            if key in self._written:
                continue
            self._written.add(key)
            numbers = {"score": found.score, "coverage": found.coverage, "episodes": float(found.episodes)}
            numbers |= {f"pass@{k}": value for k, value in found.pass_at.items()}
            about = {name: str(value) for name, value in asdict(found).items() if name in ("digest", "dataset")}
            self._metrics.eval(found.policy, found.version, numbers, at_s=found.at_s, **about)
            self._show(f"{found.policy}/eval", numbers, found.version)

    def _show(self, prefix: str, metrics: dict[str, float], x: int) -> None:
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(f"{prefix}/{name}", value, x)


def last_event(trace: Path) -> int:
    """Id of the last event that is in the file; a torn last line is cut off."""
    if not trace.exists():
        return 0
    text = trace.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        with trace.open("r+b") as file:
            file.truncate(len(whole))
    lines = whole.splitlines()
    return int(json.loads(lines[-1])["id"]) if lines else 0


def _new_events(db: RunDb, after: int) -> Iterator[dict[str, Any]]:
    while rows := db.events(after):
        yield from rows
        after = int(rows[-1]["id"])


def _alive(run: RunFolder) -> list[Any]:
    return [point for point in read_points(run.metrics) if not point.superseded]


def _summary_writer(folder: Path) -> Sink:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))
