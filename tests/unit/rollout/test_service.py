"""The service's loops against a dataflow that is told what to answer, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from astraflow.errors import (
    Closed,
    ConfigMismatch,
    Fenced,
    NameTaken,
    TimedOut,
    TooLarge,
    Unauthorised,
    Unavailable,
    UnknownLease,
    UnknownVersion,
)
from astraflow.observe.waits import WaitReason
from astraflow.rollout.play import WorkflowPlayer
from astraflow.rollout.served import Load, ServedPolicy
from astraflow.rollout.service import RolloutService
from astraflow.rollout.settings import RolloutSettings
from astraflow.rollout.template import ChatTemplate
from astraflow.rollout.workflow import Agents, Reward
from astraflow.testing.fake_engine import FakeEngine
from astraflow.testing.virtual_clock import VirtualClock
from astraflow.testing.virtual_loop import run_virtual
from astraflow.types import Episode, FailureKind, Lease, Manifest, Outcome, Task
from astraflow.wire import messages as m
from tests.unit.rollout.doubles import ScriptedEngine, lease, reply, seat

DONE = Episode(task_key="t", outcome=Outcome.COMPLETED, score=1.0)


def manifest(version: int) -> Manifest:
    return Manifest(policy="main", version=version, digest=f"d{version}", files=(), serial=version + 1)


class ScriptedDataflow:
    """Gives the leases once; answers with ``errors`` of a call first. Finished when every lease has ended."""

    def __init__(self, *leases: Lease, newest: int = 0, finish: bool = True) -> None:
        self.waiting = list(leases)
        self.newest = newest
        self.finish = finish
        self.open = {each.id for each in leases}
        self.errors: dict[str, list[Exception]] = {}
        self.submitted: dict[str, Episode] = {}
        self.handed_back: list[str] = []
        self.beats: list[m.RenewRequest] = []
        self.asked: list[int] = []
        self.lost: tuple[str, ...] = ()
        self.drain = False
        self.hellos: list[m.HelloRequest] = []
        self.last_words: list[m.ReportRequest] = []

    def _maybe(self, call: str) -> None:
        if self.errors.get(call):
            raise self.errors[call].pop(0)

    @property
    def manifests(self) -> dict[str, Manifest]:
        return {"main": manifest(self.newest)}

    async def hello(self, request: m.HelloRequest) -> m.HelloReply:
        self.hellos.append(request)
        self._maybe("hello")
        return m.HelloReply(run="r", config_digest="", heartbeat_s=2.0, dead_after_s=10.0)

    async def lease(self, request: m.LeaseRequest) -> m.LeaseReply:
        self._maybe("lease")
        self.asked.append(request.count)
        if not self.waiting:
            await asyncio.sleep(request.wait_s)
        given = tuple(self.waiting[: request.count])
        self.waiting = self.waiting[request.count :]
        finished = self.finish and not self.open
        reason = None if given else WaitReason.NO_ROOM.value
        return m.LeaseReply(leases=given, manifests=self.manifests, reason=reason, finished=finished)

    async def renew(self, request: m.RenewRequest) -> m.RenewReply:
        self._maybe("renew")
        self.beats.append(request)
        lost = tuple(each for each in self.lost if each in request.held)
        self.open -= set(lost)
        return m.RenewReply(
            lost=lost, manifests=self.manifests, drain=self.drain, finished=self.finish and not self.open
        )

    async def submit(self, request: m.SubmitRequest) -> m.SubmitReply:
        name = f"{request.group}/{request.index}/{request.attempt}"
        self.open.discard(name)
        self._maybe("submit")
        self.submitted[name] = request.episode
        return m.SubmitReply()

    async def hand_back(self, request: m.HandBackRequest) -> m.Done:
        self._maybe("hand_back")
        self.handed_back += request.held
        self.open -= set(request.held)
        return m.Done()

    async def report(self, request: m.ReportRequest) -> m.Done:
        self._maybe("report")
        self.last_words.append(request)
        return m.Done()

    async def manifest(self, request: m.ManifestRequest) -> Manifest:
        return manifest(request.version or 0)


class Weights:
    """A Follower without files: loads what it is offered."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._offered = asyncio.Event()
        self.wanted: Manifest | None = None
        self.error: str | None = None
        self.loaded: Manifest | None = None
        self.pulling: int | None = None
        self.cache = self

    async def fetch(self, manifest: Manifest) -> Sequence[Path]:
        return []

    def kept(self, manifest: Manifest) -> AbstractContextManager[None]:
        return nullcontext()

    def metrics(self) -> dict[str, float]:
        return {"weights/bytes": 7.0}

    def offer(self, manifest: Manifest) -> None:
        if self.wanted is None or manifest.serial > self.wanted.serial:
            self.wanted = manifest
            self._offered.set()

    async def until_loaded(self, serial: int, *, deadline_s: float) -> Manifest:
        deadline = asyncio.get_running_loop().time() + deadline_s
        while self.loaded is None or self.loaded.serial < serial:
            if asyncio.get_running_loop().time() >= deadline:
                raise TimedOut("weights")
            await asyncio.sleep(0.1)
        return self.loaded

    async def run(self) -> None:
        while True:
            await self._offered.wait()
            self._offered.clear()
            assert self.wanted is not None
            await self._load(self.wanted, [])
            self.loaded = self.wanted


def served(**engine: Any) -> ServedPolicy:
    return ServedPolicy("main", FakeEngine(policy="main", **engine), Weights)


def service(
    dataflow: Any,
    player: Any,
    *,
    policies: dict[str, ServedPolicy] | None = None,
    newcomers: Any = None,
    **settings: Any,
) -> RolloutService:
    policies = {"main": served()} if policies is None else policies
    return RolloutService(
        name="w",
        incarnation="w#1",
        dataflow=dataflow,
        players={"": player},
        policies=policies,
        capabilities=m.Capabilities(policies=tuple(policies), code_digest="c", config_digest="k"),
        settings=RolloutSettings(**{"slots": 2, **settings}),
        newcomers=newcomers,
        clock=VirtualClock(asyncio.get_running_loop()),
    )


def taking(seconds: float) -> Callable[[Lease], Any]:
    async def player(lease: Lease) -> Episode:
        await asyncio.sleep(seconds)
        return DONE

    return player


async def quick(lease: Lease) -> Episode:
    return DONE


async def hang(lease: Lease) -> Episode:
    await asyncio.Event().wait()
    raise AssertionError


def leases(count: int, **fields: Any) -> list[Lease]:
    return [lease(index=index, **fields) for index in range(count)]


def test_every_lease_is_played_and_submitted() -> None:
    async def main() -> tuple[ScriptedDataflow, RolloutService]:
        dataflow = ScriptedDataflow(*leases(7))
        worker = service(dataflow, taking(1.0))
        await worker.run()
        assert len(asyncio.all_tasks()) == 1
        return dataflow, worker

    dataflow, worker = run_virtual(main)
    assert len(dataflow.submitted) == 7 and not dataflow.handed_back
    assert max(dataflow.asked) == 2 and min(dataflow.asked) >= 1
    assert worker.activity.counts["episode/completed"] == 7
    assert (dataflow.hellos[0].code_digest, dataflow.hellos[0].config_digest) == ("c", "k")


def test_no_lease_before_weights_are_loaded() -> None:
    async def main() -> None:
        dataflow = ScriptedDataflow(*leases(1))
        worker = service(dataflow, quick, policies={"main": served(load_s=30.0)})
        task = asyncio.ensure_future(worker.run())
        await asyncio.sleep(20)
        assert not dataflow.asked
        assert dataflow.beats[-1].report.doing == "weights"
        await task
        assert dataflow.submitted

    run_virtual(main)


def test_weights_that_never_come_end_the_worker_by_name() -> None:
    async def main() -> None:
        await service(ScriptedDataflow(finish=False), quick, policies={"main": served(load_s=1e6)}).run()

    with pytest.raises(TimedOut, match="weights"):
        run_virtual(main)


def test_a_worker_without_an_engine_plays() -> None:
    async def main() -> ScriptedDataflow:
        dataflow = ScriptedDataflow(*leases(3))
        await service(dataflow, quick, policies={}).run()
        return dataflow

    assert len(run_virtual(main).submitted) == 3


def test_a_lost_lease_is_cancelled_at_once_and_never_submitted() -> None:
    async def main() -> tuple[ScriptedDataflow, float]:
        dataflow = ScriptedDataflow(*leases(2))
        worker = service(dataflow, hang)
        task = asyncio.ensure_future(worker.run())
        await asyncio.sleep(5)
        dataflow.lost = ("1/0/1", "1/1/1")
        await task
        assert worker.activity.counts["lease/lost"] == 2
        return dataflow, asyncio.get_running_loop().time()

    dataflow, took = run_virtual(main)
    assert not dataflow.submitted and not dataflow.handed_back and took < 10


@pytest.mark.parametrize("error", [Fenced("newer"), Closed("ended"), UnknownLease("none")])
def test_a_refused_result_is_counted_and_forgotten(error: Exception) -> None:
    async def main() -> RolloutService:
        dataflow = ScriptedDataflow(*leases(2))
        dataflow.errors["submit"] = [error]
        worker = service(dataflow, quick)
        await worker.run()
        assert len(dataflow.submitted) == 1 and not dataflow.handed_back
        return worker

    counts = run_virtual(main).activity.counts
    assert counts[f"refused/{type(error).__name__.lower()}"] == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [(TooLarge("9 GiB"), FailureKind.WORKFLOW), (UnknownVersion("v9"), FailureKind.INFRA)],
)
def test_an_episode_that_dataflow_refuses_is_submitted_as_failed(error: Exception, kind: FailureKind) -> None:
    async def main() -> ScriptedDataflow:
        dataflow = ScriptedDataflow(*leases(1), finish=False)
        dataflow.errors["submit"] = [error]
        worker = service(dataflow, quick)
        task = asyncio.ensure_future(worker.run())
        await asyncio.sleep(5)
        worker.stop()
        await task
        return dataflow

    (episode,) = run_virtual(main).submitted.values()
    assert episode.failure is kind and str(error) in str(episode.error)


def test_f81_one_episode_s_bug_does_not_touch_its_siblings() -> None:
    async def player(lease: Lease) -> Episode:
        if lease.index == 1:
            raise ValueError("a bug")
        if lease.index == 3:
            await asyncio.Event().wait()
        await asyncio.sleep(0.05)
        return DONE

    async def main() -> ScriptedDataflow:
        dataflow = ScriptedDataflow(*leases(4))
        worker = service(dataflow, player, slots=4)
        task = asyncio.ensure_future(worker.run())
        await asyncio.sleep(3)
        dataflow.lost = ("1/3/1",)  # dataflow's own time limit ends what never returns
        await task
        assert len(asyncio.all_tasks()) == 1
        return dataflow

    found = {name: episode.failure for name, episode in run_virtual(main).submitted.items()}
    assert found == {"1/0/1": None, "1/1/1": FailureKind.WORKFLOW, "1/2/1": None}


def test_f81_two_results_an_error_and_a_timeout_are_four_within_two_limits(smollm2: ChatTemplate) -> None:
    """ok(1), ValueError, ok(0) after .05 s, and one that never ends, whose limit is .2 s."""

    async def workflow(task: Task, agents: Agents) -> Reward:
        what = task.payload["what"]
        await agents["main"].chat([{"role": "user", "content": "hi"}])
        if what == "raises":
            raise ValueError("a bug")
        if what == "hangs":
            await asyncio.Event().wait()
        await asyncio.sleep(0.0 if what == "right" else 0.05)
        return Reward(float(what == "right"))

    async def main() -> tuple[dict[str, Episode], float]:
        loop = asyncio.get_running_loop()
        tasks = ("right", "raises", "late", "hangs")
        dataflow = ScriptedDataflow(
            *(lease(index=n, payload={"what": what}, time_limit_s=0.2) for n, what in enumerate(tasks))
        )
        engine = ScriptedEngine(*[reply([5, 2])] * 4)
        player = WorkflowPlayer(workflow=workflow, seats={"main": seat(engine, smollm2)}, clock=VirtualClock(loop))
        took: list[float] = []
        submit = dataflow.submit

        async def timed(request: m.SubmitRequest) -> m.SubmitReply:
            took.append(loop.time())
            return await submit(request)

        dataflow.submit = timed  # type: ignore[method-assign]
        worker = service(dataflow, player, slots=4, policies={})
        began = loop.time()
        await worker.run()
        assert len(asyncio.all_tasks()) == 1, "nobody is left behind"
        return dataflow.submitted, max(took) - began

    submitted, took = run_virtual(main)
    found = {name: (episode.score, episode.failure) for name, episode in submitted.items()}
    assert found == {
        "1/0/1": (1.0, None),
        "1/1/1": (None, FailureKind.WORKFLOW),
        "1/2/1": (0.0, None),
        "1/3/1": (None, FailureKind.TIMEOUT),
    }
    assert took < 0.4


def test_an_unknown_workflow_is_failed_and_named() -> None:
    async def main() -> ScriptedDataflow:
        strange = Lease(group=1, index=0, attempt=1, task=DUEL)
        dataflow = ScriptedDataflow(strange)
        await service(dataflow, quick).run()
        return dataflow

    (episode,) = run_virtual(main).submitted.values()
    assert episode.failure is FailureKind.INFRA and "'duel'" in str(episode.error)


DUEL = lease().task.__class__(key="t", workflow="duel")


def test_f86_a_stop_hands_back_what_does_not_end_in_time() -> None:
    async def main() -> tuple[ScriptedDataflow, float]:
        dataflow = ScriptedDataflow(*leases(3), finish=False)
        worker = service(dataflow, hang, slots=3, drain_grace_s=4.0)
        task = asyncio.ensure_future(worker.run())
        await asyncio.sleep(5)
        worker.stop()
        began = asyncio.get_running_loop().time()
        await task
        worker.stop()  # nothing more happens
        assert len(asyncio.all_tasks()) == 1
        return dataflow, asyncio.get_running_loop().time() - began

    dataflow, took = run_virtual(main)
    assert sorted(dataflow.handed_back) == ["1/0/1", "1/1/1", "1/2/1"]
    assert not dataflow.submitted and took == pytest.approx(4.0, abs=0.5)


def test_f86_a_second_stop_is_at_once() -> None:
    async def main() -> tuple[ScriptedDataflow, float]:
        dataflow = ScriptedDataflow(*leases(3), finish=False)
        worker = service(dataflow, hang, slots=3, drain_grace_s=1000.0)
        task = asyncio.ensure_future(worker.run())
        await asyncio.sleep(5)
        worker.stop()
        await asyncio.sleep(1)
        worker.stop()
        await task
        return dataflow, asyncio.get_running_loop().time()

    dataflow, ended = run_virtual(main)
    assert len(dataflow.handed_back) == 3 and ended < 7


def test_what_ends_within_the_grace_is_submitted() -> None:
    async def main() -> ScriptedDataflow:
        dataflow = ScriptedDataflow(*leases(4), finish=False)
        worker = service(dataflow, taking(3.0))
        task = asyncio.ensure_future(worker.run())
        await asyncio.sleep(1.0)
        dataflow.drain = True
        await task
        return dataflow

    dataflow = run_virtual(main)
    assert len(dataflow.submitted) == 2 and len(dataflow.waiting) == 2 and not dataflow.handed_back


def test_a_crash_hands_back_and_raises_its_cause() -> None:
    async def main() -> None:
        dataflow = ScriptedDataflow(*leases(3))
        worker = service(dataflow, hang, slots=3)
        task = asyncio.ensure_future(worker.run())
        await asyncio.sleep(3)
        dataflow.errors["renew"] = [Unauthorised("the token was withdrawn")]
        try:
            await task
        finally:
            assert len(dataflow.handed_back) == 3

    with pytest.raises(Unauthorised, match="withdrawn"):
        run_virtual(main)


def test_dataflow_out_of_reach_is_waited_for() -> None:
    async def main() -> tuple[ScriptedDataflow, RolloutService]:
        dataflow = ScriptedDataflow(*leases(4))
        dataflow.errors = {call: [Unavailable("restarts")] * 3 for call in ("hello", "lease", "renew", "submit")}
        worker = service(dataflow, quick)
        await worker.run()
        return dataflow, worker

    dataflow, worker = run_virtual(main)
    assert len(dataflow.submitted) == 4
    assert worker.activity.report({}).metrics["wait_s/dataflow"] > 0


def test_dataflow_out_of_reach_for_too_long_ends_the_worker() -> None:
    async def main() -> None:
        dataflow = ScriptedDataflow(*leases(1))
        task = asyncio.ensure_future(service(dataflow, hang, patience_s=60.0).run())
        await asyncio.sleep(5)
        dataflow.errors["renew"] = [Unavailable("gone")] * 10_000
        await task

    with pytest.raises(Unavailable, match="gone"):
        run_virtual(main)


def test_nobody_at_the_address_is_said_every_few_seconds_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        dataflow = ScriptedDataflow()
        dataflow.errors["hello"] = [Unavailable("http://nobody:1 did not answer")] * 10_000
        await service(dataflow, quick, patience_s=60.0).run()

    with pytest.raises(Unavailable, match=r"dataflow was out of reach for 6[0-9] s: http://nobody:1 did not answer"):
        run_virtual(main)
    said = [record.getMessage() for record in caplog.records if "waits_for_dataflow" in record.getMessage()]
    assert 8 <= len(said) <= 15
    assert "patience_s=60: http://nobody:1 did not answer" in said[0]


def test_a_short_absence_is_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        dataflow = ScriptedDataflow(*leases(1))
        dataflow.errors["hello"] = [Unavailable("restarts")] * 3
        await service(dataflow, quick).run()

    run_virtual(main)
    assert not [record for record in caplog.records if "waits_for_dataflow" in record.getMessage()]


def test_f99_another_config_is_refused_at_the_door() -> None:
    async def main() -> None:
        dataflow = ScriptedDataflow()
        dataflow.errors["hello"] = [ConfigMismatch("other config")]
        await service(dataflow, quick).run()

    with pytest.raises(ConfigMismatch):
        run_virtual(main)


def test_a_name_is_waited_for_a_moment() -> None:
    async def main(taken: int) -> None:
        dataflow = ScriptedDataflow(*leases(1))
        dataflow.errors["hello"] = [NameTaken("heard 1 s ago")] * taken
        await service(dataflow, quick).run()

    run_virtual(lambda: main(4))
    with pytest.raises(NameTaken):
        run_virtual(lambda: main(1000))


def test_a_beat_says_what_is_held_served_and_waited_for() -> None:
    async def main() -> ScriptedDataflow:
        dataflow = ScriptedDataflow(*leases(2), finish=False)
        worker = service(dataflow, taking(5.0))
        task = asyncio.ensure_future(worker.run())
        await asyncio.sleep(20)
        worker.stop()
        await task
        return dataflow

    beats = run_virtual(main).beats
    playing = next(beat for beat in beats if beat.held)
    assert playing.held == ("1/0/1", "1/1/1")
    assert (playing.report.doing, playing.report.versions) == ("playing 2 episodes", {"main": 0})
    idle = beats[-1].report
    assert (idle.doing, idle.why) == ("lease", "no_room") and idle.since_s >= 0
    assert idle.metrics["episode/completed"] == 2.0 and idle.metrics["wait_s/lease"] > 0


def test_a_pinned_version_is_loaded_beside_the_newest() -> None:
    async def main() -> None:
        policy = served(versions_held=2)
        dataflow = ScriptedDataflow(lease(versions={"main": 1}), newest=5)

        async def player(lease: Lease) -> Episode:
            await worker.hold("main", lease.versions["main"])
            assert policy.engine.info().versions == (1, 5)
            return DONE

        worker = service(dataflow, player, policies={"main": policy})
        await worker.run()
        assert [episode.failure for episode in dataflow.submitted.values()] == [None]

    run_virtual(main)


def test_with_room_for_one_an_update_waits_for_the_pinned_lease() -> None:
    async def main() -> None:
        policy = served(versions_held=1)
        dataflow = ScriptedDataflow(lease(versions={"main": 0}))

        async def player(lease: Lease) -> Episode:
            await worker.hold("main", 0)
            dataflow.newest = 1
            await asyncio.sleep(30)
            assert policy.engine.info().versions == (0,)
            await worker.hold("main", 0)
            dataflow.finish = False
            return DONE

        worker = service(dataflow, player, policies={"main": policy})
        task = asyncio.ensure_future(worker.run())
        await asyncio.sleep(40)
        assert policy.engine.info().versions == (1,)
        worker.stop()
        await task
        assert [episode.failure for episode in dataflow.submitted.values()] == [None]

    run_virtual(main)


def test_with_room_for_one_a_past_version_is_refused_by_name() -> None:
    async def main() -> Episode:
        dataflow = ScriptedDataflow(lease(versions={"main": 0}), newest=3)

        async def player(lease: Lease) -> Episode:
            await worker.hold("main", 0)
            return DONE

        worker = service(dataflow, player, policies={"main": served(versions_held=1)})
        await worker.run()
        return next(iter(dataflow.submitted.values()))

    episode = run_virtual(main)
    assert episode.failure is FailureKind.INFRA and "room for 1" in str(episode.error)
