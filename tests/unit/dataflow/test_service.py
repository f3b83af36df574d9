"""The shell: long polls, group commit, full disks, one dataflow a run, and what it says of itself."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from astraflow.algorithms.curate import Shuffled
from astraflow.dataflow.service import DataflowService
from astraflow.dataflow.settings import Limits
from astraflow.errors import (
    BadRequest,
    ConfigError,
    ConfigMismatch,
    Conflict,
    Fenced,
    NameTaken,
    RunFailed,
    StorageFull,
    Unavailable,
    UnknownVersion,
)
from astraflow.types import FailureKind
from astraflow.wire import messages as m
from tests.unit.dataflow.rig import Rig, make_spec, manifest, supervised_episode, tasks


def lease_request(worker: str, *, count: int = 2, wait_s: float = 0.0) -> m.LeaseRequest:
    return m.LeaseRequest(
        worker=worker,
        incarnation=worker,
        count=count,
        capabilities=m.Capabilities(policies=("p",)),
        wait_s=wait_s,
    )


def test_calls_that_arrive_together_share_one_transaction() -> None:
    with Rig(make_spec(max_staleness=9, steps=20)) as rig:
        statements: list[str] = []
        rig.service.ledger.store.connection.set_trace_callback(statements.append)

        async def together() -> list[m.LeaseReply]:
            return await asyncio.gather(*(rig.service.lease(lease_request(f"w{i}")) for i in range(8)))

        replies = rig.go(together())
        assert len({lease.id for reply in replies for lease in reply.leases}) == 16
        assert statements.count("COMMIT") == 1


def test_one_refused_call_harms_none_of_the_others() -> None:
    with Rig() as rig:
        lease = rig.leases(1)[0]
        good = m.SubmitRequest(worker="w", group=1, index=0, attempt=1, episode=rig.episode(lease))
        bad = m.SubmitRequest(worker="w", group=1, index=0, attempt=9, episode=rig.episode(lease))

        async def together() -> list[Any]:
            return await asyncio.gather(
                rig.service.submit(bad), rig.service.submit(good), rig.service.submit(bad), return_exceptions=True
            )

        first, second, third = rig.go(together())
        assert isinstance(first, BadRequest) and isinstance(third, BadRequest)
        assert second == m.SubmitReply()


def test_a_long_poll_for_a_batch_ends_when_the_group_is_kept() -> None:
    with Rig(make_spec(groups_per_batch=1)) as rig:
        epoch = rig.resume()
        leases = rig.leases(2)

        async def race() -> m.BatchReply:
            poll = asyncio.ensure_future(rig.service.batch(m.BatchRequest(policy="p", trainer_epoch=epoch, wait_s=5)))
            await asyncio.sleep(0.01)
            assert not poll.done()
            for lease in leases:
                await rig.service.submit(
                    m.SubmitRequest(
                        worker="w", group=lease.group, index=lease.index, attempt=1,
                        episode=rig.episode(lease, float(lease.index)),
                    )
                )  # fmt: skip
            return await poll

        assert rig.go(race()).batch is not None


def test_a_long_poll_for_a_lease_ends_when_an_episode_fails() -> None:
    with Rig(make_spec(max_staleness=0, groups_per_batch=1)) as rig:
        lease = rig.leases(2)[0]

        async def race() -> m.LeaseReply:
            poll = asyncio.ensure_future(rig.service.lease(lease_request("b", wait_s=5)))
            await asyncio.sleep(0.01)
            assert not poll.done()
            await rig.service.hand_back(m.HandBackRequest(worker="w", held=(lease.id,)))
            return await poll

        assert [x.attempt for x in rig.go(race()).leases] == [2]


@pytest.mark.parametrize("who", ["rollout", "trainer"])
def test_a_long_poll_is_heard_when_it_comes_and_not_while_it_waits(who: str) -> None:
    """Its process may be stopped or dead since: whatever wakes the poll is no sign of life."""
    with Rig(make_spec(max_staleness=0, groups_per_batch=1, limits=Limits(dead_after_s=10))) as rig:
        epoch = rig.resume()
        rig.leases(2, worker="busy")

        def poll() -> Any:
            if who == "rollout":
                return rig.service.lease(lease_request("gone", wait_s=5))
            return rig.service.batch(m.BatchRequest(policy="p", trainer_epoch=epoch, wait_s=5))

        async def woken_late() -> None:
            waiting = asyncio.ensure_future(poll())
            await asyncio.sleep(0.01)
            rig.clock.advance(5)
            await rig.service.hand_back(m.HandBackRequest(worker="busy", held=()))
            rig.service._mark_all()
            await rig.service.tick()
            await asyncio.sleep(0.01)
            rig.clock.advance(5)
            await rig.service.tick()
            waiting.cancel()

        rig.go(woken_late())
        name = "gone" if who == "rollout" else "t-p"
        found = rig.db.all("SELECT name FROM components WHERE state = 'dead' AND component = ?", who)
        assert (name,) in found


def test_a_waiting_poll_of_a_process_that_was_replaced_gets_nothing() -> None:
    with Rig(make_spec(max_staleness=0, groups_per_batch=1)) as rig:
        held = rig.leases(2, worker="busy")

        async def replaced() -> m.LeaseReply:
            waiting = asyncio.ensure_future(rig.service.lease(lease_request("gone", wait_s=5)))
            await asyncio.sleep(0.01)
            rig.clock.advance(5)
            await rig.service.hello(m.HelloRequest(component="rollout", name="gone", incarnation="new"))
            await rig.service.hand_back(m.HandBackRequest(worker="busy", held=tuple(each.id for each in held)))
            return await waiting

        with pytest.raises(NameTaken, match="was replaced"):
            rig.go(replaced())


def test_a_long_poll_ends_at_its_own_deadline_with_the_reason() -> None:
    with Rig() as rig:
        epoch = rig.resume()
        reply = rig.go(rig.service.batch(m.BatchRequest(policy="p", trainer_epoch=epoch, wait_s=0.05)))
        assert (reply.batch, reply.reason) == (None, "no_ready")


def test_a_waiting_trainer_hears_that_a_newer_one_fenced_it() -> None:
    with Rig() as rig:
        epoch = rig.resume()

        async def race() -> m.BatchReply:
            poll = asyncio.ensure_future(rig.service.batch(m.BatchRequest(policy="p", trainer_epoch=epoch, wait_s=5)))
            await asyncio.sleep(0.01)
            await rig.service.resume(
                m.ResumeRequest(policy="p", version=0, digest=manifest().digest, trainer="t-p", incarnation="t2")
            )
            return await poll

        with pytest.raises(Fenced):
            rig.go(race())


def test_f86_whoever_waits_when_the_service_closes_is_told_at_once() -> None:
    with Rig() as rig:
        epoch = rig.resume()

        async def race() -> m.BatchReply:
            poll = asyncio.ensure_future(rig.service.batch(m.BatchRequest(policy="p", trainer_epoch=epoch, wait_s=60)))
            await asyncio.sleep(0.01)
            await rig.service.close()
            await rig.service.close()
            async with asyncio.timeout(1):
                return await poll

        assert rig.go(race()).batch is None
        with pytest.raises(Unavailable, match="closed"):
            rig.lease()


def test_a_call_that_was_cancelled_before_its_transaction_has_no_effect() -> None:
    with Rig() as rig:

        async def leave() -> None:
            call = asyncio.ensure_future(rig.service.lease(lease_request("gone")))
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.sleep(0.01)

        rig.go(leave())
        assert rig.states("episodes").get("leased", 0) == 0


def fill(rig: Rig) -> None:
    """SQLite may not grow its file any further: its way to say that the disk is full."""
    pages = rig.db.one("PRAGMA page_count")[0]
    rig.db.run(f"PRAGMA max_page_count = {pages}")


def test_a_full_disk_refuses_writes_nothing_by_half_and_goes_on(tmp_path: Path) -> None:
    with Rig(folder=tmp_path, spec=make_spec(max_staleness=400, steps=500)) as rig:
        fill(rig)
        with pytest.raises(StorageFull, match="free some space"):
            for _ in range(300):
                rig.play_groups(1)
        assert "StorageFull" in (rig.go(rig.flow.status()).error or "")
        rig.balanced()
        rig.db.run("PRAGMA max_page_count = 1000000")
        rig.advance(11)
        rig.play_groups(1)
        assert rig.go(rig.flow.status()).error is None
        rig.balanced()


def test_after_a_full_disk_leases_and_workers_get_a_new_term(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could renew: an hour without space must not count against who waited for it."""

    def full(*_: object) -> bool:
        raise StorageFull("no space")

    with Rig() as rig:
        held = rig.leases(2)
        with monkeypatch.context() as patch:
            patch.setattr("astraflow.dataflow.service.sweep", full)
            rig.clock.advance(3600)
            with pytest.raises(StorageFull):
                rig.go(rig.service.tick())
        rig.advance(1)
        assert rig.states("episodes")["leased"] == 2
        assert rig.db.one("SELECT state FROM components WHERE component = 'rollout'") == ("alive",)
        rig.advance(8)
        assert rig.renew(held).lost == ()
        rig.advance(11)
        assert rig.states("episodes").get("leased", 0) == 0, "a new term, once"
        rig.balanced()


def test_a_full_disk_under_a_payload_file_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    import msgspec

    from astraflow.dataflow.payloads import Payloads
    from tests.unit.dataflow.rig import sample

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Rig(folder=tmp_path) as rig:
        lease = rig.leases(1)[0]
        episode = rig.episode(lease)
        agent = msgspec.structs.replace(episode.trajectories[0], samples=(sample([rig.digest("p")], length=200_000),))
        episode = msgspec.structs.replace(episode, trajectories=(agent,))
        with monkeypatch.context() as patch:
            patch.setattr(Payloads, "_write", full)
            with pytest.raises(StorageFull):
                rig.submit(lease, episode=episode)
        assert rig.states("episodes")["leased"] == 1
        assert not rig.submit(lease, episode=episode).duplicate


def test_a_second_dataflow_of_one_run_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    with Rig(folder=tmp_path) as rig:
        with pytest.raises(Conflict, match="another dataflow serves"):
            DataflowService.open(make_spec(), tmp_path)
        rig.restart()
        rig.leases(1)


def test_a_file_of_another_schema_is_refused(tmp_path: Path) -> None:
    with Rig(folder=tmp_path) as rig:
        rig.db.run("UPDATE meta SET value = 1 WHERE key = 'schema'")
    with pytest.raises(ConfigError, match="this ledger has schema 1, this program reads 2"):
        DataflowService.open(make_spec(), tmp_path)


def test_another_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    from dataclasses import replace

    with Rig(folder=tmp_path):
        pass
    with pytest.raises(ConfigError, match="ledger is of run 'r'"):
        DataflowService.open(replace(make_spec(), run="other"), tmp_path)


def test_other_initial_weights_are_refused_and_the_same_ones_are_fine() -> None:
    with Rig() as rig:
        rig.go(rig.service.publish_initial(manifest()))
        assert rig.db.number("SELECT COUNT(*) FROM publications") == 1
        with pytest.raises(UnknownVersion, match="another model"):
            rig.go(rig.service.publish_initial(manifest(salt="x")))


def test_a_process_with_another_config_or_code_is_refused() -> None:
    from dataclasses import replace

    with Rig(replace(make_spec(), config_digest="c" * 64, code_digest="k" * 64)) as rig:
        hello = m.HelloRequest(
            component="rollout", name="w", incarnation="1", config_digest="c" * 64, code_digest="k" * 64
        )
        assert rig.go(rig.flow.hello(hello)).heartbeat_s == 2.0
        import msgspec

        for change in ({"config_digest": "x" * 64}, {"code_digest": ""}):
            with pytest.raises(ConfigMismatch):
                rig.go(rig.flow.hello(msgspec.structs.replace(hello, **change)))
        with pytest.raises(BadRequest, match="a component is"):
            rig.go(rig.flow.hello(msgspec.structs.replace(hello, component="hacker")))


def test_a_run_whose_first_episodes_all_fail_in_user_code_stops_with_the_first_cause() -> None:
    with Rig(make_spec(max_staleness=9, limits=Limits(first_failures=5))) as rig:
        epoch = rig.resume()
        for _ in range(5):
            rig.submit_failed(rig.leases(1)[0], FailureKind.WORKFLOW)
        words = (
            "first 5 episodes all failed in user code or by their time limit, first: workflow: boom; mend that first"
        )
        with pytest.raises(RunFailed, match=words):
            rig.batch(epoch)


def test_a_run_of_which_no_episode_ever_returns_stops_with_the_first_cause() -> None:
    """Not after hours, when the policy is found barren."""
    with Rig(make_spec(max_staleness=9, limits=Limits(first_failures=5))) as rig:
        for _ in range(4):
            rig.submit_failed(rig.leases(1)[0], FailureKind.TIMEOUT)
        assert rig.service.ledger.state == "running"
        rig.submit_failed(rig.leases(1)[0], FailureKind.TIMEOUT)
        assert "the first 5 episodes all failed in user code or by their time limit" in str(rig.db.get("error"))


def test_one_good_episode_is_enough_to_go_on() -> None:
    with Rig(make_spec(max_staleness=9, limits=Limits(first_failures=5))) as rig:
        rig.submit(rig.leases(1)[0])
        for _ in range(9):
            rig.submit_failed(rig.leases(1)[0], FailureKind.WORKFLOW)
        assert rig.service.ledger.state == "running"


def test_supervised_rows_before_them_are_no_good_episodes(tmp_path: Path) -> None:
    """They run none of the user's code: a supervised warm-up must not hide that all of it is broken."""
    limits = Limits(first_failures=3)
    with Rig(make_spec(source=tasks(9, workflow="supervised"), limits=limits, max_staleness=9), folder=tmp_path) as rig:
        for lease in rig.leases(3):
            rig.submit(lease, episode=supervised_episode(lease))
        assert rig.db.counter("episodes_done") == 3
        # The curate goes over to tasks that are played.
        rig.spec.pipeline.curate.next = Shuffled(tasks(9), group_size=2).next  # type: ignore[method-assign]
        played = [lease for lease in rig.lease(20).leases if lease.task.workflow == ""]
        for lease in played[:3]:
            rig.submit_failed(lease, FailureKind.WORKFLOW)
        assert "first 3 episodes all failed in user code" in str(rig.db.get("error"))


def test_status_says_that_a_policy_has_no_trainer_yet() -> None:
    with Rig() as rig:
        rig.play_groups(2)
        (policy,) = rig.go(rig.flow.status()).policies
        assert policy.waits.startswith("no trainer of it has registered yet; 2/2 groups kept")
        rig.resume()
        (policy,) = rig.go(rig.flow.status()).policies
        assert policy.waits.startswith("2/2 groups kept")


def test_status_and_events_tell_the_story() -> None:
    with Rig() as rig:
        epoch = rig.resume()
        rig.step(epoch)
        rig.leases(1)
        status = rig.go(rig.flow.status())
        assert status.policies[0].groups == {"trained": 2, "open": 1}
        assert status.episodes == {"done": 4, "leased": 1, "pending": 1}
        assert {(c.component, c.name, c.held) for c in status.components} == {
            ("dataflow", "r", 0),
            ("rollout", "w", 1),
            ("trainer", "t-p", 0),
        }
        events = rig.go(rig.flow.events(m.EventsRequest())).events
        kinds = [event.kind for event in events]
        for kind in (
            "published",
            "admitted",
            "leased",
            "done",
            "ready",
            "kept",
            "cut",
            "issued",
            "committed",
            "resumed",
        ):
            assert kind in kinds, kind
        assert [e.id for e in events] == sorted(e.id for e in events)
        later = rig.go(rig.flow.events(m.EventsRequest(after=events[-2].id)))
        assert later.events == events[-1:]


def test_a_report_is_a_heartbeat() -> None:
    with Rig() as rig:
        rig.resume()
        for _ in range(3):
            rig.advance(6)
            rig.go(
                rig.flow.report(
                    m.ReportRequest(
                        component="trainer", name="t-p", incarnation="t", report=m.ComponentReport(doing="step")
                    )
                )
            )
        (trainer,) = [each for each in rig.go(rig.flow.status()).components if each.component == "trainer"]
        assert (trainer.state, trainer.report.doing) == ("alive", "step")


def test_the_ledger_needs_no_torch_and_a_bug_reaches_its_caller(caplog: pytest.LogCaptureFixture) -> None:
    with Rig() as rig:

        def broken(now: float) -> None:
            raise sqlite3.IntegrityError("a bug")

        with pytest.raises(sqlite3.IntegrityError):
            rig.go(rig.service._commits.write(broken))
        assert "transaction_failed" in caplog.text
        rig.leases(1)


def test_a_bug_that_one_call_meets_harms_none_of_the_others(caplog: pytest.LogCaptureFixture) -> None:
    with Rig() as rig:
        lease = rig.leases(1)[0]

        def broken(now: float) -> None:
            rig.db.set("half", 1)
            raise OverflowError("too large for the database")

        async def together() -> list[Any]:
            good = m.SubmitRequest(worker="w", group=1, index=0, attempt=1, episode=rig.episode(lease))
            calls = (rig.service._commits.write(broken), rig.service.submit(good))
            return await asyncio.gather(*calls, return_exceptions=True)

        first, second = rig.go(together())
        assert isinstance(first, OverflowError)
        assert second == m.SubmitReply()
        assert rig.db.get("half") is None
        assert "OverflowError" in caplog.text
        assert rig.service.ledger.state == "running"


def test_a_bug_that_nobody_waits_for_stops_the_run_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that cannot be settled would be tried for ever, in every transaction."""

    def broken(*_: object) -> None:
        raise IndexError("out of the table")

    with Rig() as rig:
        monkeypatch.setattr("astraflow.dataflow.service.settle_ready", broken)
        rig.play_groups(1)
        status = rig.go(rig.service.status())
        assert (status.state, status.error) == ("failed", "RunFailed: inside dataflow: IndexError: out of the table")
        rig.balanced()


def test_run_is_the_passing_of_time() -> None:
    from astraflow.clock import SystemClock
    from astraflow.dataflow.ledger import Ledger
    from astraflow.dataflow.store import connect

    async def live() -> str:
        spec = make_spec(limits=Limits(lease_ttl_s=0.1, dead_after_s=0.1, heartbeat_s=0.05))
        service = DataflowService(spec, Ledger(connect(":memory:"), spec), clock=SystemClock())
        await service.publish_initial(manifest())
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            ticking = group.create_task(service.run())
            await service.lease(lease_request("w"))
            again = await service.lease(lease_request("b", wait_s=4))
            ticking.cancel()
        await service.close()
        return again.leases[0].id

    assert asyncio.run(live()) in ("1/0/2", "2/0/1")
