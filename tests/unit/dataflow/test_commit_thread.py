"""The transaction is written by a thread while the loop goes on: nobody hears of anything before it is on disk."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow import commits
from astraflow.dataflow.conservation import balance
from astraflow.dataflow.local import LocalDataflow
from astraflow.dataflow.service import DataflowService
from astraflow.errors import StorageFull, TimedOut
from astraflow.types import Episode, Lease, Outcome, Trajectory, Turn
from astraflow.wire import messages as m
from tests.unit.dataflow.rig import make_spec, manifest, sample


class Gate:
    """Stands before every COMMIT: lets it pass, holds it, or lets it fail."""

    def __init__(self, service: DataflowService) -> None:
        self.passing = threading.Event()
        self.passing.set()
        self.reached = threading.Event()
        self.error: Exception | None = None
        self.commits = 0
        store = service.ledger.store
        execute = store.run

        def run(sql: str, *values: Any) -> Any:
            if sql == "COMMIT":
                assert threading.current_thread() is not threading.main_thread()
                self.commits += 1
                self.reached.set()
                assert self.passing.wait(10)
                if self.error is not None:
                    raise self.error
            return execute(sql, *values)

        setattr(store, "run", run)  # noqa: B010 - where the connection's own method is

    async def hold(self) -> None:
        self.passing.clear()
        self.reached.clear()

    async def until_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, 10)


def run(folder: Path, scenario: Callable[[DataflowService, Gate], Awaitable[None]]) -> None:
    async def main() -> None:
        service = DataflowService.open(make_spec(), folder, in_thread=True)
        gate = Gate(service)
        try:
            async with asyncio.timeout(30):
                await service.publish_initial(manifest())
                await scenario(service, gate)
        finally:
            gate.passing.set()
            await service.close()

    asyncio.run(main())


async def leases(service: DataflowService, count: int) -> tuple[Lease, ...]:
    can = m.Capabilities(policies=("p",))
    reply = await service.lease(m.LeaseRequest(worker="w", incarnation="w", count=count, capabilities=can))
    return reply.leases


def submit(service: DataflowService, lease: Lease, *, attempt: int | None = None) -> Awaitable[m.SubmitReply]:
    newest = service.ledger.policies.newest["p"]
    played = Trajectory(
        agent="a",
        role="role_p",
        policy="p",
        samples=(sample([(newest.version, newest.digest)]),),
        turns=(Turn(index=0, sample=0, start=2, stop=4, reward=float(lease.index)),),
    )
    episode = Episode(task_key=lease.task.key, outcome=Outcome.COMPLETED, trajectories=(played,))
    return service.submit(
        m.SubmitRequest(
            worker="w", group=lease.group, index=lease.index, attempt=attempt or lease.attempt, episode=episode
        )
    )


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_guarantee_nobody_is_answered_before_it_is_on_disk(tmp_path: Path) -> None:
    async def scenario(service: DataflowService, gate: Gate) -> None:
        (lease,) = await leases(service, 1)
        await gate.hold()
        calls = [asyncio.ensure_future(submit(service, lease))]
        await gate.until_reached()
        calls.append(asyncio.ensure_future(service.status()))  # type: ignore[arg-type]
        calls.append(asyncio.ensure_future(service.manifest(m.ManifestRequest(policy="p"))))  # type: ignore[arg-type]
        await turns()
        assert not any(call.done() for call in calls)
        with sqlite3.connect(tmp_path / "run.db") as other:
            assert other.execute("SELECT COUNT(*) FROM payloads").fetchone() == (0,)
        other.close()
        gate.passing.set()
        assert not (await calls[0]).duplicate
        status: Any = await calls[1]
        assert status.episodes["done"] == 1

    run(tmp_path, scenario)


def test_what_arrives_meanwhile_shares_the_next_transaction(tmp_path: Path) -> None:
    async def scenario(service: DataflowService, gate: Gate) -> None:
        first, *others = await leases(service, 4)
        await gate.hold()
        call = asyncio.ensure_future(submit(service, first))
        await gate.until_reached()
        rest = [asyncio.ensure_future(submit(service, lease)) for lease in others[:2]]
        rest.append(asyncio.ensure_future(submit(service, others[2], attempt=9)))
        await turns()
        gate.passing.set()
        await asyncio.wait([call, *rest])
        times = service.ledger.store.all("SELECT at FROM events WHERE kind = 'done' ORDER BY id")
        assert len(times) == 3 and len(set(times)) == 2 and times[1] == times[2]
        assert [type(each.exception()).__name__ for each in rest] == ["NoneType", "NoneType", "UnknownLease"]

    run(tmp_path, scenario)


def test_a_disk_that_is_full_at_the_commit_undoes_all_of_it_and_the_run_goes_on(tmp_path: Path) -> None:
    async def scenario(service: DataflowService, gate: Gate) -> None:
        first, second, *_ = await leases(service, 2)
        gate.error = sqlite3.OperationalError("database or disk is full")
        found = await asyncio.gather(submit(service, first), submit(service, second), return_exceptions=True)
        assert [type(each) for each in found] == [StorageFull, StorageFull]
        assert service._commits.full_at is not None and balance(service.ledger.store.connection)["difference"] == 0
        gate.error = None
        replies = await asyncio.gather(submit(service, first), submit(service, second))
        assert [reply.duplicate for reply in replies] == [False, False]
        assert service._commits.full_at is None

    run(tmp_path, scenario)


def test_an_uncommitted_version_that_is_undone_was_never_seen(tmp_path: Path) -> None:
    """The memory of what is published goes back with the transaction, and readers meanwhile saw nothing of it."""

    async def scenario(service: DataflowService, gate: Gate) -> None:
        epoch = (
            await service.resume(
                m.ResumeRequest(policy="p", version=0, digest=manifest().digest, trainer="t", incarnation="t")
            )
        ).trainer_epoch
        await asyncio.gather(*(submit(service, lease) for lease in await leases(service, 4)))
        batch = (await service.batch(m.BatchRequest(policy="p", trainer_epoch=epoch, wait_s=5.0))).batch
        assert batch is not None
        request = m.CommitRequest(policy="p", batch=batch.id, trainer_epoch=epoch, manifest=manifest("p", 1))
        await gate.hold()
        commit = asyncio.ensure_future(service.commit(request))
        await gate.until_reached()
        read = asyncio.ensure_future(service.manifest(m.ManifestRequest(policy="p")))
        live = asyncio.ensure_future(service.live_manifests())
        await turns()
        assert not read.done() and not live.done()
        gate.error = sqlite3.OperationalError("database or disk is full")
        gate.passing.set()
        await asyncio.wait([commit, read, live])
        assert isinstance(commit.exception(), StorageFull)
        assert read.result().version == 0 and {each.version for each in live.result()} == {0}
        gate.error = None
        assert (await service.commit(request)).version == 1
        assert (await service.manifest(m.ManifestRequest(policy="p"))).version == 1

    run(tmp_path, scenario)


def test_closing_lets_what_is_being_written_end(tmp_path: Path) -> None:
    async def scenario(service: DataflowService, gate: Gate) -> None:
        first, second, *_ = await leases(service, 2)
        await gate.hold()
        call = asyncio.ensure_future(submit(service, first))
        await gate.until_reached()
        late = asyncio.ensure_future(submit(service, second))
        await turns()
        closing = asyncio.ensure_future(service.close())
        await turns()
        assert not closing.done()
        gate.passing.set()
        await asyncio.wait([call, late, closing])
        assert not call.result().duplicate and type(late.exception()).__name__ == "Unavailable"

    run(tmp_path, scenario)
    with sqlite3.connect(tmp_path / "run.db") as db:
        assert db.execute("SELECT COUNT(*) FROM payloads").fetchone() == (1,)
    db.close()


def test_a_disk_that_takes_nothing_does_not_hold_the_end_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "LAST_WRITE_S", 0.05)

    async def scenario(service: DataflowService, gate: Gate) -> None:
        lease, *_ = await leases(service, 1)
        await gate.hold()
        call = asyncio.ensure_future(submit(service, lease))
        await gate.until_reached()
        with pytest.raises(TimedOut, match=r"^storage: the disk did not take the last transaction within 0\.05 s$"):
            await service.close()
        gate.passing.set()
        assert not (await call).duplicate, "it was written in the end, and said so"
        await service._commits.drained()
        service.ledger.store.connection.close()
        assert service._lock is not None
        service._lock.close()

    run(tmp_path, scenario)


def test_what_a_transition_sets_off_comes_in_a_transaction_of_its_own(tmp_path: Path) -> None:
    async def scenario(service: DataflowService, gate: Gate) -> None:
        seen: list[str] = []

        def first(now: float) -> None:
            seen.append("first")
            service._commits.post(lambda _: seen.append("second"))

        before = gate.commits
        await service._commits.write(first)
        await service._commits.write(lambda _: seen.append("third"))
        assert seen == ["first", "second", "third"] and gate.commits - before == 2

    run(tmp_path, scenario)


def test_a_whole_run(tmp_path: Path) -> None:
    async def scenario(service: DataflowService, gate: Gate) -> None:
        flow = LocalDataflow(service)
        resume = m.ResumeRequest(policy="p", version=0, digest=manifest().digest, trainer="t", incarnation="t")
        epoch = (await flow.resume(resume)).trainer_epoch
        for version in range(3):
            played = await leases(service, 4)
            await asyncio.gather(*(submit(service, lease) for lease in played))
            batch = (await flow.batch(m.BatchRequest(policy="p", trainer_epoch=epoch, wait_s=5.0))).batch
            assert batch is not None and len(batch.rows) == 4
            made = manifest("p", version + 1)
            await flow.commit(m.CommitRequest(policy="p", batch=batch.id, trainer_epoch=epoch, manifest=made))
            await service.tick()
        assert service.ledger.state == "finished"
        assert balance(service.ledger.store.connection)["difference"] == 0

    run(tmp_path, scenario)
