"""The trainer of one policy. It knows dataflow and the weight store, never a worker or another trainer.

    resume ─► batch ─► step ─► publish ─► commit ─► checkpoint ─┐
                ▲                                               │
                └───────────────────────────────────────────────┘

It may die at any line: an uncommitted batch comes again, and what was committed after the newest checkpoint is
un-committed by ``resume``, whose batches come again in the same order. "Trained" is what the checkpoint says.

| waits for | ended by | or by |
|---|---|---|
| BATCH     | a batch, or ``finished``   | ``Starved``, an error of the call |
| PUBLISH   | the store                  | an error of the store             |
| COMMIT    | dataflow's answer          | an error of the call              |
| STORAGE   | space on a full disk       | ``SPACE_PATIENCE_S``              |
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from astraflow.clock import Clock, SystemClock
from astraflow.disk import SPACE_PATIENCE_S, is_full
from astraflow.errors import AstraFlowError, StorageFull, Unavailable, UnknownVersion
from astraflow.observe.points import reach
from astraflow.observe.waits import Wait
from astraflow.trainer.backend import Backend, StepReport
from astraflow.trainer.checkpoints import Checkpoints, TrainedStep, read_trained, require_same_version
from astraflow.types import Batch, Manifest
from astraflow.wire import messages as m
from astraflow.wire.goodbye import TRAINED, say_goodbye
from astraflow.wire.protocol import Dataflow

R = TypeVar("R")
COMPONENT = "trainer"
MAX_ERROR_CHARS = 2000
SPACE_PAUSE_S = 1.0


class Publisher(Protocol):
    """``weights.publish.Publisher``."""

    def publish(
        self, version: int, files: Sequence[Path], digest: str, trainer_epoch: int = 0
    ) -> Coroutine[Any, Any, Manifest]:
        """Store the files; the manifest is for ``commit``. Again is free."""


class Offload(Protocol):
    """Runs a blocking call elsewhere: ``asyncio.to_thread``, or in a simulator the call itself."""

    def __call__(self, call: Callable[[], R], /) -> Coroutine[Any, Any, R]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerIdentity:
    """Who this trainer is to dataflow."""

    policy: str
    name: str
    config_digest: str = ""
    code_digest: str = ""
    config: dict[str, str] = field(default_factory=dict)
    """Path of each setting to its value as JSON, told with the first call."""
    incarnation: str = ""
    """Empty: drawn at the start of the loop."""

    def hello(self, incarnation: str) -> m.HelloRequest:
        """The first call."""
        return m.HelloRequest(
            component=COMPONENT,
            name=self.name,
            incarnation=incarnation,
            config_digest=self.config_digest,
            code_digest=self.code_digest,
            config=self.config,
            policy=self.policy,
        )


class TrainLoop:
    """Pull a batch, step, publish, commit. ``await run()`` returns at the end of the run, or raises the first cause."""

    def __init__(
        self,
        *,
        identity: TrainerIdentity,
        dataflow: Dataflow,
        backend: Backend,
        publisher: Publisher,
        checkpoints: Checkpoints,
        checkpoint_every: int,
        offload: Offload = asyncio.to_thread,
        clock: Clock | None = None,
        say: Callable[[str], None] = lambda _: None,
        observe: Callable[[Batch, StepReport, dict[str, float]], None] = lambda *_: None,
    ) -> None:
        """``backend`` holds version 0. ``say``: one line for people. ``observe``: after each commit."""
        self.identity = identity
        self._incarnation = identity.incarnation or secrets.token_hex(8)
        self._dataflow = dataflow
        self._backend = backend
        self._publisher = publisher
        self._checkpoints = checkpoints
        self._checkpoint_every = checkpoint_every
        self._offload = offload
        self._clock = clock or SystemClock()
        self._say = say
        self._observe = observe
        self._epoch = 0
        self._trained: list[TrainedStep] = []
        self._heartbeat_s, self._run = 2.0, ""
        self._doing = ("starting", self._clock.monotonic(), "")
        self._waited_s: dict[str, float] = {}
        self._saved = -1
        """Version of the newest checkpoint on disk."""

    async def run(self) -> None:
        """Raises what ended it: Fenced (a newer trainer took over), the backend's error, Unavailable, Starved."""
        hello = await self._with_space(lambda: self._dataflow.hello(self.identity.hello(self._incarnation)))
        self._heartbeat_s, self._run = hello.heartbeat_s, hello.run
        finished = await self._resume()
        while not finished:
            batch = await self._next_batch()
            if batch is None:
                break
            finished = await self._train(batch)
        if self._backend.version > max(self._saved, 0):
            await self._with_space(self._checkpoint)
        await self.say_goodbye(TRAINED)

    async def say_goodbye(self, why: str) -> None:
        """After the loop was ended on purpose: dataflow need not wait until this trainer is dead."""
        await say_goodbye(self._dataflow, COMPONENT, self.identity.name, self._incarnation, self._report(), why=why)

    # ── the parts ──

    async def _resume(self) -> bool:
        """Register at the newest checkpoint that dataflow knows (a rollback makes it forget), else at version 0."""
        await self._blocking("looks for a checkpoint", self._checkpoints.clear_scratch)
        refused: UnknownVersion | None = None
        complete = self._checkpoints.complete(self._say)
        while found := await self._offload(lambda: next(complete, None)):
            version, folder = found
            await self._blocking("loads its checkpoint", partial(self._load, version, folder))
            manifest = await self._with_space(lambda version=version: self._publish(version))  # type: ignore[misc]
            try:
                return await self._register(manifest.digest, manifest)
            except UnknownVersion as error:
                self._say(f"dataflow does not know checkpoint {folder}: {error}")
                refused = error
        if refused is not None:
            raise refused
        return await self._register(await self._blocking("hashes its weights", self._backend.digest), None)

    async def _register(self, digest: str, manifest: Manifest | None) -> bool:
        """Fence older trainers; returns whether the run is finished. Raises UnknownVersion."""
        version = self._backend.version
        request = m.ResumeRequest(
            policy=self.identity.policy,
            version=version,
            digest=digest,
            trainer=self.identity.name,
            incarnation=self._incarnation,
            manifest=manifest,
        )
        reply = await self._with_space(lambda: self._dataflow.resume(request))
        self._epoch = reply.trainer_epoch
        claim = partial(self._checkpoints.claim, self._run, self._epoch)
        await self._with_space(lambda: self._blocking("claims its checkpoints", claim))
        if reply.undone:
            self._say(f"{len(reply.undone)} batches committed after version {version} come again")
        return reply.finished

    async def _next_batch(self) -> Batch | None:
        """None: the run is finished."""
        self._set_doing(Wait.BATCH)
        began = self._clock.monotonic()
        while True:
            request = m.BatchRequest(
                policy=self.identity.policy,
                trainer_epoch=self._epoch,
                wait_s=self._heartbeat_s,
                report=self._report(),
            )
            reply = await self._with_space(lambda request=request: self._dataflow.batch(request))  # type: ignore[misc]
            self._doing = (*self._doing[:2], reply.why)
            if reply.batch is not None or reply.finished:
                self._add_wait(Wait.BATCH, began)
                return reply.batch

    async def _train(self, batch: Batch) -> bool:
        """One batch to its commit. Returns whether the run is finished."""
        began = self._clock.monotonic()
        try:
            report = await self._blocking("steps", lambda: self._backend.step(batch), f"batch {batch.id}")
        except Exception as error:
            await self._fail(batch, error)
            raise
        stepped = self._clock.monotonic()
        manifest = None
        if report.updated:
            manifest = await self._with_space(lambda: self._publish(batch.version + 1))
        published = self._clock.monotonic()
        metrics = {**report.metrics, "time/step_s": stepped - began, "time/publish_s": published - stepped}
        reply = await self._commit(batch, manifest, report, metrics)
        if report.updated:
            self._trained.append(TrainedStep(step=batch.version + 1, batch=batch.id, trained=report.trained))
            if self._backend.version % self._checkpoint_every == 0:
                await self._with_space(self._checkpoint)
        self._observe(batch, report, metrics)
        return reply.finished

    async def _commit(
        self, batch: Batch, manifest: Manifest | None, report: StepReport, metrics: dict[str, float]
    ) -> m.CommitReply:
        """The only call that advances the version."""
        self._set_doing(Wait.COMMIT, f"batch {batch.id}")
        began = self._clock.monotonic()
        reach("trainer.before_commit")
        request = m.CommitRequest(
            policy=self.identity.policy,
            batch=batch.id,
            trainer_epoch=self._epoch,
            manifest=manifest,
            reason=None if report.updated else report.reason,
            metrics=metrics,
            oldest_checkpoint=self._checkpoints.oldest(self._saved),
        )
        reply = await self._with_space(lambda: self._dataflow.commit(request))
        reach("trainer.after_commit")
        self._add_wait(Wait.COMMIT, began)
        return reply

    async def _publish(self, version: int) -> Manifest:
        files, digest, folder = await self._blocking("exports", self._export)
        self._set_doing(Wait.PUBLISH, f"version {version}")
        began = self._clock.monotonic()
        try:
            reach("trainer.before_publish")
            manifest = await self._beating(self._publisher.publish(version, files, digest, self._epoch))
            reach("trainer.after_publish")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._add_wait(Wait.PUBLISH, began)
        return manifest

    async def _checkpoint(self) -> None:
        version = self._backend.version
        extra = {"policy": self.identity.policy, "trainer_epoch": self._epoch, "version": version}
        reach("trainer.before_checkpoint")
        await self._blocking(
            "writes a checkpoint",
            lambda: self._checkpoints.write(version, lambda into: self._backend.save(into, extra), self._trained),
        )
        reach("trainer.after_checkpoint")
        self._saved = version

    def _load(self, version: int, folder: Path) -> None:
        extra = self._backend.load(folder)
        require_same_version(self._backend.version, version, folder)
        self._epoch = int(extra["trainer_epoch"])
        self._trained = read_trained(folder)
        self._saved = version
        self._say(f"goes on from {folder}")

    def _export(self) -> tuple[list[Path], str, Path]:
        """Files, digest, and the folder to remove when they are published. On the disk of the checkpoints."""
        folder = self._checkpoints.scratch()
        try:
            return self._backend.export(folder), self._backend.digest(), folder
        except Exception:
            shutil.rmtree(folder, ignore_errors=True)  # on a full disk it would take the space that is waited for
            raise

    async def _fail(self, batch: Batch, error: Exception) -> None:
        """Tell dataflow which batch it was; the error itself goes on to whoever started us."""
        text = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
        self._set_doing("failed", text)
        request = m.FailRequest(
            policy=self.identity.policy,
            batch=batch.id,
            failures=batch.failures,
            trainer_epoch=self._epoch,
            error=text,
        )
        try:
            reply = await self._dataflow.fail(request)
        except AstraFlowError as refused:  # the first cause matters more than that it could not be reported
            self._say(f"could not report the failure of batch {batch.id}: {refused}")
            return
        self._say(f"batch {batch.id} failed {reply.failures} times: {text}")

    # ── what it says of itself ──

    async def _with_space(self, attempt: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Its result. A full disk is waited for, by name: what was trained is not thrown away for want of space."""
        began: float | None = None
        while True:
            try:
                return await attempt()
            except Exception as error:
                now = self._clock.monotonic()
                if not is_full(error) or (began is not None and now - began >= SPACE_PATIENCE_S):
                    raise
                if began is None:
                    began = now
                    self._say(f"waits for space: {error}")
                self._doing = (Wait.STORAGE.value, began, str(error)[:MAX_ERROR_CHARS])
            await self._beat()
            await asyncio.sleep(SPACE_PAUSE_S)
            self._waited_s[Wait.STORAGE.value] = self._waited_s.get(Wait.STORAGE.value, 0.0) + SPACE_PAUSE_S

    async def _blocking(self, doing: str, call: Callable[[], R], why: str = "") -> R:
        self._set_doing(doing, why)
        return await self._beating(self._offload(call))

    async def _beating(self, work: Coroutine[Any, Any, R]) -> R:
        """The result of ``work``; while it lasts, dataflow hears of this trainer."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=self._heartbeat_s)
                if not task.done():
                    await self._beat()
            return task.result()
        finally:
            task.cancel()

    async def _beat(self) -> None:
        request = m.ReportRequest(
            component=COMPONENT, name=self.identity.name, incarnation=self._incarnation, report=self._report()
        )
        # Dataflow restarts, or its disk is full: what follows the work finds out whether that is over.
        with suppress(Unavailable, StorageFull):
            await self._dataflow.report(request)

    def _report(self) -> m.ComponentReport:
        doing, since, why = self._doing
        return m.ComponentReport(
            doing=doing,
            since_s=max(0.0, self._clock.monotonic() - since),
            why=why,
            versions={self.identity.policy: self._backend.version},
            metrics={f"wait_s/{name}": seconds for name, seconds in self._waited_s.items()},
        )

    def _set_doing(self, doing: str, why: str = "") -> None:
        self._doing = (str(doing), self._clock.monotonic(), why)

    def _add_wait(self, wait: Wait, began: float) -> None:
        self._waited_s[wait.value] = self._waited_s.get(wait.value, 0.0) + self._clock.monotonic() - began
