"""A dataflow of one policy in memory, with the transitions that matter to a trainer, and plugs to pull."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from astraflow.errors import Fenced, UnknownVersion, VersionConflict
from astraflow.trainer.backend import StepReport
from astraflow.types import AdvantageRun, Batch, Manifest, Row, Span
from astraflow.wire import messages as m

R = TypeVar("R")


class Killed(BaseException):
    """kill -9: nothing below may catch it."""


class Plug:
    """Counts the places where a process may die, and dies at one of them."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.passed = 0
        self.names: list[str] = []

    def __call__(self, name: str) -> None:
        self.names.append(name)
        self.passed += 1
        if self.passed - 1 == self.at:
            raise Killed(name)


class CountingBackend:
    """Weights are one number that depends on what was trained, in order. Real files."""

    def __init__(self, plug: Callable[[str], None] = lambda _: None) -> None:
        self.weight = 1
        self.version_ = 0
        self.trained: list[tuple[str, int]] = []
        self._plug = plug

    @property
    def version(self) -> int:
        return self.version_

    def step(self, batch: Batch) -> StepReport:
        self._plug("step")
        if not batch.rows:
            return StepReport(updated=False, reason="no_signal")
        assert batch.version == self.version_
        self.weight = (self.weight * 31 + batch.id) % 1_000_003
        self.version_ += 1
        new = tuple((row.sample_id, row.use) for row in batch.rows)
        self.trained += new
        self._plug("stepped")
        return StepReport(updated=True, trained=new, metrics={"loss/total": float(self.weight)})

    def export(self, folder: Path) -> list[Path]:
        path = folder / "model.safetensors"
        path.write_text(str(self.weight))
        self._plug("export")
        return [path]

    def digest(self) -> str:
        return f"d{self.weight}"

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        (folder / "weights").write_text(str(self.weight))
        self._plug("save")
        own = {"weight": self.weight, "version": self.version_, "trained": self.trained}
        (folder / "state.json").write_text(json.dumps({"own": own, "extra": extra}))

    def load(self, folder: Path) -> dict[str, Any]:
        state = json.loads((folder / "state.json").read_text())
        self.weight, self.version_ = state["own"]["weight"], state["own"]["version"]
        self.trained = [(name, use) for name, use in state["own"]["trained"]]
        extra: dict[str, Any] = state["extra"]
        return extra

    def close(self) -> None:
        return None


class CountingPublisher:
    def __init__(self, plug: Callable[[str], None] = lambda _: None) -> None:
        self._plug = plug
        self.published: list[int] = []

    async def publish(self, version: int, files: Sequence[Path], digest: str, trainer_epoch: int = 0) -> Manifest:
        assert all(path.exists() for path in files)
        self._plug("publish")
        self.published.append(version)
        return Manifest(policy="p", version=version, digest=digest, files=(), trainer_epoch=trainer_epoch)


class ScriptedDataflow:
    """``Dataflow`` for a trainer. Batch ids in ``dull`` have no rows."""

    def __init__(self, *, steps: int, dull: Sequence[int] = (), quiet_polls: int = 0) -> None:
        self.steps = steps
        self.epoch = 0
        self.version = 0
        self.committed: list[tuple[int, str]] = []
        """(batch id, digest) of version 1, 2, …"""
        self.dropped: list[tuple[int, str | None]] = []
        self.published = {(0, "d1")}
        self.failures: list[m.FailRequest] = []
        self.reports: list[m.ComponentReport] = []
        self.last_words: list[m.ReportRequest] = []
        self.polls: list[m.BatchRequest] = []
        self.commits: list[m.CommitRequest] = []
        self.hellos: list[m.HelloRequest] = []
        self._dull = set(dull)
        self._quiet = quiet_polls
        self._next = 1
        self._again: list[int] = []
        self._issued: int | None = None

    async def hello(self, request: m.HelloRequest) -> m.HelloReply:
        self.hellos.append(request)
        return m.HelloReply(run="r", config_digest="", heartbeat_s=0.05, dead_after_s=10.0)

    async def resume(self, request: m.ResumeRequest) -> m.ResumeReply:
        if (request.version, request.digest) not in self.published:
            raise UnknownVersion(f"version {request.version} with digest {request.digest}")
        undone = [batch for batch, _ in self.committed[request.version :]]
        if self._issued is not None and self._issued not in self._again:
            self._again.insert(0, self._issued)
        self._issued = None
        self._again = undone + self._again
        self.committed = self.committed[: request.version]
        self.version = request.version
        self.epoch += 1
        return m.ResumeReply(
            trainer_epoch=self.epoch, undone=tuple(undone), steps=self.steps, finished=self.version >= self.steps
        )

    async def batch(self, request: m.BatchRequest) -> m.BatchReply:
        self._check(request.trainer_epoch)
        self.polls.append(request)
        if self.version >= self.steps:
            return m.BatchReply(finished=True)
        if self._quiet:
            self._quiet -= 1
            await asyncio.sleep(0)
            return m.BatchReply(reason="no_ready", why="5/8 groups")
        if self._issued is None:
            if self._again:
                self._issued = self._again.pop(0)
            else:
                self._issued, self._next = self._next, self._next + 1
        return m.BatchReply(batch=make_batch(self._issued, self.version, self.epoch, dull=self._issued in self._dull))

    async def commit(self, request: m.CommitRequest) -> m.CommitReply:
        self._check(request.trainer_epoch)
        if request.batch != self._issued:
            raise VersionConflict(f"batch {request.batch} is not out")
        self._issued = None
        self.commits.append(request)
        if request.manifest is None:
            self.dropped.append((request.batch, request.reason))
        else:
            assert request.manifest.version == self.version + 1
            self.version += 1
            self.committed.append((request.batch, request.manifest.digest))
            self.published.add((self.version, request.manifest.digest))
        return m.CommitReply(version=self.version, finished=self.version >= self.steps)

    async def fail(self, request: m.FailRequest) -> m.FailReply:
        self.failures.append(request)
        return m.FailReply(failures=len(self.failures))

    async def report(self, request: m.ReportRequest) -> m.Done:
        if request.leaving:
            self.last_words.append(request)
        else:
            self.reports.append(request.report)
        return m.Done()

    def _check(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise Fenced(f"trainer epoch {epoch} is not {self.epoch}")


class Pluggable:
    """Pulls the plug before and after each call: the request was lost, or the answer."""

    def __init__(self, inner: ScriptedDataflow, plug: Plug) -> None:
        self._inner = inner
        self._plug = plug

    def __getattr__(self, name: str) -> Callable[[Any], Coroutine[Any, Any, Any]]:
        call = getattr(self._inner, name)

        async def plugged(request: Any) -> Any:
            self._plug(f"before {name}")
            reply = await call(request)
            self._plug(f"after {name}")
            return reply

        return plugged


def make_batch(number: int, version: int, epoch: int, *, dull: bool = False) -> Batch:
    mask = np.array([False, True])
    row = Row(
        sample_id=f"{number}/0/a/0",
        tokens=np.array([1, 2], np.int32),
        mask=mask,
        logprobs=np.array([0, -1], np.float32),
        spans=(Span(start=1, stop=2, version=0, digest="d1"),),
        advantages=(AdvantageRun(start=1, stop=2, value=1.0),),
    )
    rows = () if dull else (row,)
    return Batch(
        id=number, policy="p", version=version, trainer_epoch=epoch, tokens=len(rows), sequences=len(rows), rows=rows
    )
