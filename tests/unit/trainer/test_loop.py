"""The loop: what it says, in which order, and that it may die anywhere."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from astraflow.errors import Fenced, Unavailable, UnknownVersion
from astraflow.trainer.checkpoints import Checkpoints, read_trained
from astraflow.trainer.loop import TrainerIdentity, TrainLoop
from astraflow.trainer.scratch import EXPORT, PARTIAL
from astraflow.wire import messages as m
from tests.unit.trainer.scripted import CountingBackend, CountingPublisher, Killed, Plug, Pluggable, ScriptedDataflow

R = TypeVar("R")


async def inline(call: Callable[[], R]) -> R:
    return call()


def make(
    dataflow: Any, folder: Path, *, backend: Any = None, every: int = 2, kept: int = 2, plug: Any = None, **more: Any
) -> TrainLoop:
    more.setdefault("offload", inline)
    return TrainLoop(
        identity=TrainerIdentity(policy="p", name="t"),
        dataflow=dataflow,
        backend=backend or CountingBackend(),
        publisher=CountingPublisher(plug or (lambda _: None)),
        checkpoints=Checkpoints(folder, kept=kept),
        checkpoint_every=every,
        **more,
    )


def test_a_run_from_nothing_to_its_end(tmp_path: Path) -> None:
    dataflow, backend = ScriptedDataflow(steps=5, quiet_polls=3), CountingBackend()
    asyncio.run(make(dataflow, tmp_path, backend=backend).run())
    assert [batch for batch, _ in dataflow.committed] == [1, 2, 3, 4, 5]
    assert dataflow.hellos[0].component == "trainer"
    assert backend.version == 5
    assert sorted(p.name for p in tmp_path.glob("[!.]*")) == ["owner.json", "step-00000004", "step-00000005"]
    waiting = dataflow.polls[1].report
    assert (waiting.doing, waiting.why, waiting.versions) == ("batch", "5/8 groups", {"p": 0})
    assert "wait_s/batch" in dataflow.polls[-1].report.metrics


def test_f58_step_s_makes_version_s_in_every_place(tmp_path: Path) -> None:
    """Three steps, save, resume: label, checkpoint, next step, digest agree."""
    dataflow = ScriptedDataflow(steps=3)
    asyncio.run(make(dataflow, tmp_path, every=3).run())
    version, folder = Checkpoints(tmp_path, kept=2).newest() or (0, tmp_path)
    assert (version, folder.name) == (3, "step-00000003")
    assert [s.step for s in read_trained(folder)] == [1, 2, 3]
    dataflow.steps = 4
    backend = CountingBackend()
    asyncio.run(make(dataflow, tmp_path, backend=backend).run())
    last = dataflow.commits[-1]
    assert last.manifest is not None
    assert (last.batch, last.manifest.version, backend.version) == (4, 4, 4)


def test_each_commit_tells_the_oldest_checkpoint_that_is_kept(tmp_path: Path) -> None:
    """Every second version, two kept: what is told is on disk at that moment, and never of a history that was left."""
    dataflow = ScriptedDataflow(steps=8)
    asyncio.run(make(dataflow, tmp_path).run())
    assert [commit.oldest_checkpoint for commit in dataflow.commits] == [None, None, 2, 2, 2, 2, 4, 4]


def test_f52_batch_without_signal_is_committed_with_its_reason_and_no_version(tmp_path: Path) -> None:
    dataflow = ScriptedDataflow(steps=3, dull=[2])
    asyncio.run(make(dataflow, tmp_path).run())
    assert dataflow.dropped == [(2, "no_signal")]
    assert [batch for batch, _ in dataflow.committed] == [1, 3, 4]


def test_guarantee_kill_at_any_line_trains_everything_once(tmp_path: Path) -> None:
    """A process dies at each place where it touches the world; the next one ends the run with the very same steps."""
    clean = ScriptedDataflow(steps=3, dull=[2])
    asyncio.run(make(clean, tmp_path / "clean").run())
    counting = Plug()
    run_once(ScriptedDataflow(steps=3, dull=[2]), tmp_path / "count", counting)
    assert counting.passed > 30
    for at in range(counting.passed):
        folder, dataflow, plug = tmp_path / str(at), ScriptedDataflow(steps=3, dull=[2]), Plug(at)
        with pytest.raises(Killed):
            run_once(dataflow, folder, plug)
        backend = run_once(dataflow, folder, Plug())
        assert dataflow.committed == clean.committed, plug.names[-1]
        assert [name for name, _ in backend.trained] == [f"{batch}/0/a/0" for batch, _ in clean.committed]
        found = Checkpoints(folder, kept=2).newest()
        assert found is not None
        steps = read_trained(found[1])
        assert [(s.step, s.batch) for s in steps] == [(n + 1, b) for n, (b, _) in enumerate(clean.committed)]
        gc.collect()  # the killed one's files are closed, as if it had been a process
        Checkpoints(folder, kept=2).clear_scratch()
        assert not [*folder.glob(f"{EXPORT}*"), *folder.glob(f"{PARTIAL}*")]


def run_once(dataflow: ScriptedDataflow, folder: Path, plug: Plug) -> CountingBackend:
    backend = CountingBackend(plug)
    loop = make(Pluggable(dataflow, plug), folder, backend=backend, plug=plug)
    asyncio.run(loop.run())
    return backend


def test_an_error_in_the_step_is_reported_and_raised(tmp_path: Path) -> None:
    class Poisoned(CountingBackend):  # a stand-in for one line of it
        def step(self, batch: Any) -> Any:
            raise ValueError("token 70000 is outside the vocabulary")

    dataflow = ScriptedDataflow(steps=3)
    with pytest.raises(ValueError, match="token 70000"):
        asyncio.run(make(dataflow, tmp_path, backend=Poisoned()).run())
    assert [(f.batch, f.error) for f in dataflow.failures] == [(1, "ValueError: token 70000 is outside the vocabulary")]
    assert dataflow.committed == []


def test_the_first_cause_survives_when_it_cannot_be_reported(tmp_path: Path) -> None:
    class Deaf(ScriptedDataflow):
        async def fail(self, request: m.FailRequest) -> m.FailReply:
            raise Unavailable("gone")

    class Poisoned(CountingBackend):
        def step(self, batch: Any) -> Any:
            raise ValueError("first cause")

    said: list[str] = []
    with pytest.raises(ValueError, match="first cause"):
        asyncio.run(make(Deaf(steps=1), tmp_path, backend=Poisoned(), say=said.append).run())
    assert said == ["could not report the failure of batch 1: gone"]


def test_an_older_trainer_is_fenced_and_leaves_with_the_reason(tmp_path: Path) -> None:
    dataflow = ScriptedDataflow(steps=3)

    class Overtaken(CountingBackend):
        def step(self, batch: Any) -> Any:
            dataflow.epoch += 1  # a newer trainer has resumed meanwhile
            return super().step(batch)

    with pytest.raises(Fenced, match="trainer epoch 1 is not 2"):
        asyncio.run(make(dataflow, tmp_path, backend=Overtaken()).run())
    assert dataflow.committed == []


def test_it_beats_while_it_steps(tmp_path: Path) -> None:
    dataflow = ScriptedDataflow(steps=1)
    heard = threading.Event()

    class Slow(CountingBackend):
        def step(self, batch: Any) -> Any:
            assert heard.wait(10), "no heartbeat within 10 s"
            return super().step(batch)

    async def report(request: m.ReportRequest) -> m.Done:
        dataflow.reports.append(request.report)
        heard.set()
        return m.Done()

    dataflow.report = report  # type: ignore[method-assign]
    asyncio.run(make(dataflow, tmp_path, backend=Slow(), offload=asyncio.to_thread).run())
    assert (dataflow.reports[0].doing, dataflow.reports[0].why) == ("steps", "batch 1")


def test_a_lost_heartbeat_does_not_end_the_step(tmp_path: Path) -> None:
    dataflow = ScriptedDataflow(steps=1)
    tried = threading.Event()

    class Slow(CountingBackend):
        def step(self, batch: Any) -> Any:
            assert tried.wait(10)
            return super().step(batch)

    async def report(request: m.ReportRequest) -> m.Done:
        tried.set()
        raise Unavailable("restarting")

    dataflow.report = report  # type: ignore[method-assign]
    asyncio.run(make(dataflow, tmp_path, backend=Slow(), offload=asyncio.to_thread).run())
    assert len(dataflow.committed) == 1


def test_a_run_that_is_finished_already_does_nothing(tmp_path: Path) -> None:
    dataflow = ScriptedDataflow(steps=2)
    asyncio.run(make(dataflow, tmp_path).run())
    polls = len(dataflow.polls)
    asyncio.run(make(dataflow, tmp_path).run())
    assert len(dataflow.polls) == polls


def test_after_a_rollback_an_older_checkpoint_is_used(tmp_path: Path) -> None:
    dataflow = ScriptedDataflow(steps=4)
    asyncio.run(make(dataflow, tmp_path).run())
    dataflow.published = {each for each in dataflow.published if each[0] <= 3}
    dataflow.committed, dataflow.version, dataflow.steps = dataflow.committed[:3], 3, 5
    said: list[str] = []
    backend = CountingBackend()
    asyncio.run(make(dataflow, tmp_path, backend=backend, say=said.append).run())
    assert "does not know checkpoint" in said[1]
    assert [batch for batch, _ in dataflow.committed] == [1, 2, 3, 5, 6]
    assert len(set(backend.trained)) == len(backend.trained) == 5


def test_a_checkpoint_of_another_run_is_refused_with_its_reason(tmp_path: Path) -> None:
    asyncio.run(make(ScriptedDataflow(steps=2), tmp_path).run())
    with pytest.raises(UnknownVersion, match="version 2"):
        asyncio.run(make(ScriptedDataflow(steps=2), tmp_path).run())


def test_a_resumed_trainer_publishes_its_weights_again(tmp_path: Path) -> None:
    dataflow = ScriptedDataflow(steps=2)
    asyncio.run(make(dataflow, tmp_path).run())
    dataflow.steps = 3
    loop = make(dataflow, tmp_path)
    asyncio.run(loop.run())
    publisher = loop._publisher
    assert isinstance(publisher, CountingPublisher)
    assert publisher.published == [2, 3]
