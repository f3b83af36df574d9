"""A policy that joins while a worker is at work: loaded first, offered then; what cannot be loaded harms nobody."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from astraflow.errors import ConfigError, EngineFailed
from astraflow.rollout.cast import Cast
from astraflow.rollout.elsewhere import Elsewhere, RemoteEngine
from astraflow.rollout.newcomers import AGAIN_S, Newcomers
from astraflow.rollout.play import WorkflowPlayer, classify
from astraflow.rollout.served import ServedPolicy
from astraflow.rollout.workflow import Agents, Reward
from astraflow.testing.check_workflow import character_template
from astraflow.testing.fake_engine import FakeEngine
from astraflow.testing.virtual_loop import run_virtual
from astraflow.types import FailureKind, Manifest, Purpose, Sampling, Task
from astraflow.wire import messages as m
from astraflow.wire.messages import AddedPolicy, ManifestRequest
from tests.unit.rollout.doubles import lease
from tests.unit.rollout.test_service import ScriptedDataflow, Weights, leases, quick, service

ADDED = AddedPolicy(name="new", like="main")


class Flow:
    """Knows version 0 of the newcomer."""

    async def manifest(self, request: ManifestRequest) -> Manifest:
        return Manifest(policy=request.policy, version=0, digest="d0", files=(), serial=1)


class Follower:
    """Loads what it is offered."""

    def __init__(self, load: Any) -> None:
        self._load, self.loaded, self.offered = load, None, asyncio.Event()

    def offer(self, manifest: Manifest) -> None:
        self.wanted = manifest
        self.offered.set()

    async def run(self) -> None:
        await self.offered.wait()
        await self._load(self.wanted, [])
        self.loaded = self.wanted
        await asyncio.Event().wait()

    async def until_loaded(self, serial: int, *, deadline_s: float) -> None:
        async with asyncio.timeout(deadline_s):
            while self.loaded is None:  # noqa: ASYNC110 - a double, in virtual time
                await asyncio.sleep(0.1)


def newcomers(make: Callable[[AddedPolicy], Any], elsewhere: Elsewhere | None = None) -> Newcomers:
    return Newcomers(
        make=make,
        policies={},
        cast=Cast(Sampling(max_tokens=4), {"judge": Sampling(max_tokens=2)}),
        elsewhere=elsewhere or Elsewhere(),
        dataflow=Flow(),  # type: ignore[arg-type]
    )


def served(added: AddedPolicy) -> tuple[ServedPolicy, Any]:
    return ServedPolicy(added.name, FakeEngine(policy=added.name), Follower), character_template()  # type: ignore[arg-type]


async def hear(found: Newcomers, seconds: float, *, beats: int = 3) -> None:
    """So many heartbeats tell of it, then so long passes, then the worker leaves."""
    async with asyncio.TaskGroup() as tasks:
        for _ in range(beats):
            found.hear([ADDED], tasks)
            await asyncio.sleep(seconds / beats)
        found.leave()


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads do not know of virtual time."""

    async def call(function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", call)


def test_it_is_offered_once_its_weights_are_loaded(inline: None) -> None:
    made: list[AddedPolicy] = []

    def make(added: AddedPolicy) -> tuple[ServedPolicy, Any]:
        made.append(added)
        return served(added)

    found = newcomers(make)
    with pytest.raises(EngineFailed, match="policy 'new' is not here"):
        found.cast.seats({"judge": "new"})
    run_virtual(lambda: hear(found, 5.0))
    assert made == [ADDED] and list(found.policies) == ["new"]
    assert found.policies["new"].engine.info().versions == (0,)
    seat = found.cast.seats({"judge": "new"})["judge"]
    assert (seat.policy, seat.sampling.max_tokens) == ("new", 2)


def test_one_that_cannot_be_made_is_tried_again_and_harms_nobody(inline: None) -> None:
    tries = itertools.count()

    def make(added: AddedPolicy) -> tuple[ServedPolicy, Any]:
        if next(tries) < 2:
            raise ConfigError("the folder is gone")
        return served(added)

    found = newcomers(make)
    run_virtual(lambda: hear(found, 1.5 * AGAIN_S))
    assert not found.policies
    again = newcomers(make)
    run_virtual(lambda: hear(again, 1.5 * AGAIN_S))
    assert list(again.policies) == ["new"]


def test_what_is_like_a_policy_of_other_workers_is_asked_for_at_them(inline: None) -> None:
    elsewhere = Elsewhere()
    engine = RemoteEngine("new", token=None)
    found = newcomers(lambda added: (engine, character_template()), elsewhere)
    run_virtual(lambda: hear(found, 1.0))
    assert elsewhere.engines == {"new": engine} and not found.policies
    assert found.cast.seats({"solver": "new"})["solver"].engine is engine


# ── a worker that has only just come ──


class Telling(ScriptedDataflow):
    """Every heartbeat tells of who joined, the first one too: the worker is another one's successor."""

    async def renew(self, request: m.RenewRequest) -> m.RenewReply:
        return msgspec.structs.replace(await super().renew(request), added=(ADDED,))

    async def manifest(self, request: ManifestRequest) -> Manifest:
        return await Flow().manifest(request)


class SlowEngine(FakeEngine):
    starts_in_s = 0.0

    async def start(self) -> None:
        await asyncio.sleep(self.starts_in_s)


@pytest.mark.parametrize("slow", ["start", "load"])
def test_it_joins_while_a_worker_s_own_policies_are_not_ready_yet(inline: None, slow: str) -> None:
    """Found by a run that was killed and resumed: the worker walked over its policies while another one came."""
    follows: list[str] = []

    class Once(Weights):
        async def run(self) -> None:
            follows.append(self.policy)
            await super().run()

    def policy(name: str, engine: FakeEngine) -> ServedPolicy:
        made = ServedPolicy(name, engine, Once)
        made.subscriber.policy = name  # type: ignore[attr-defined]
        return made

    async def main() -> None:
        engine = SlowEngine(policy="main", load_s=5.0 if slow == "load" else 0.0)
        engine.starts_in_s = 5.0 if slow == "start" else 0.0
        found = newcomers(lambda added: (policy(added.name, FakeEngine(policy=added.name)), character_template()))
        found.policies["main"] = policy("main", engine)
        flow = Telling(*leases(3))
        await service(flow, quick, policies=found.policies, newcomers=found).run()
        assert len(flow.submitted) == 3
        assert list(found.policies) == ["main", "new"]

    run_virtual(main)
    assert sorted(follows) == ["main", "new"], "each follows its weights once"


# ── the cast of a lease ──


async def ask(task: Task, agents: Agents) -> Reward:
    await agents["solver"].chat([{"role": "user", "content": "hi"}])
    return Reward(1.0)


async def fake(policy: str) -> FakeEngine:
    engine = FakeEngine(policy=policy, tick_s=0.01)
    await engine.load(Manifest(policy=policy, version=0, digest="d0", files=(), serial=1), [])
    return engine


@pytest.mark.parametrize("purpose", [Purpose.TRAIN, Purpose.EVAL])
@pytest.mark.parametrize(("roles", "plays"), [({}, "main"), ({"solver": "new"}, "new")])
def test_a_lease_says_who_plays(roles: dict[str, str], plays: str, purpose: Purpose) -> None:
    async def play() -> Sequence[str]:
        cast = Cast(Sampling(max_tokens=4), {})
        for policy in ("main", "new"):
            cast.join(policy, await fake(policy), character_template())
        player = WorkflowPlayer(workflow=ask, seats=cast.seats({"solver": "main"}), recast=cast.seats)
        episode = await player(lease(roles=roles, purpose=purpose))
        return [each.policy for each in episode.trajectories]

    assert run_virtual(play) == [plays]


def test_a_cast_that_is_not_here_is_the_worker_s_failure_not_the_workflow_s() -> None:
    async def play() -> None:
        cast = Cast(Sampling(max_tokens=4), {})
        cast.join("main", await fake("main"), character_template())
        for recast in (cast.seats, None):
            player = WorkflowPlayer(workflow=ask, seats=cast.seats({"solver": "main"}), recast=recast)
            with pytest.raises(EngineFailed):
                await player(lease(roles={"solver": "new"}))

    run_virtual(play)
    assert classify(EngineFailed("x"))[0] is FailureKind.INFRA
