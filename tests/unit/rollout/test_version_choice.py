"""Turns of one episode by versions of different ages: who samples which turn, and what becomes of it."""

from __future__ import annotations

from typing import Any

import pytest

from astraflow.algorithms.base import Admission, Curate
from astraflow.algorithms.curate import Shuffled, WithOlderVersions
from astraflow.engines.base import EngineInfo, GenerateReply, GenerateRequest
from astraflow.errors import ConfigError, EngineFailed, NotFound, RunFailed
from astraflow.rollout.agents import EpisodeAgents, older_version
from astraflow.rollout.workflow import Agents, Reward
from astraflow.testing.check_algorithm import check_algorithm
from astraflow.testing.check_workflow import character_template
from astraflow.testing.fake_engine import FakeEngine
from astraflow.testing.virtual_loop import run_virtual
from astraflow.types import Lease, Manifest, Sampling, Task
from tests.unit.dataflow.rig import Rig, make_spec, tasks
from tests.unit.rollout.doubles import ScriptedEngine, reply, seat

HI = {"role": "user", "content": "hi"}
TURNS = 40


def lease(chance: float, *, seed: int = 1, versions: dict[str, int] | None = None) -> Lease:
    return Lease(
        group=1, index=0, attempt=1, task=Task(key="t"), seed=seed, version_choice=chance, versions=versions or {}
    )


def info(*versions: int) -> EngineInfo:
    return EngineInfo(policy="p", max_context=9, vocabulary=9, dtype="float32", versions=versions)


async def engine(*versions: int, held: int = 2) -> FakeEngine:
    made = FakeEngine(vocabulary=40, versions_held=held)
    for version in versions:
        manifest = Manifest(policy="main", version=version, digest=f"d{version}", files=(), serial=version + 1)
        await made.load(manifest, [])
    return made


def share(chance: float, *, seed: int = 1, **more: Any) -> list[int]:
    async def play() -> list[int]:
        made = await engine(3, 4)
        agents = EpisodeAgents(lease(chance, seed=seed, **more), {"main": seat(made, character_template())})
        agent, found = agents["main"], []
        for _ in range(TURNS):
            await agent.chat([HI], max_tokens=2)
            agents.cut = None
        (trajectory,) = agents.trajectories
        for turn in trajectory.turns:
            spans = trajectory.samples[turn.sample].spans
            (version,) = {span.version for span in spans if span.start < turn.stop and turn.start < span.stop}
            found.append(version)
        return found

    return run_virtual(play)


def test_a_share_of_the_turns_is_sampled_by_the_older_version() -> None:
    assert share(0.0) == [4] * TURNS
    assert share(1.0) == [3] * TURNS
    half = share(0.5)
    assert 8 < half.count(3) < 32
    assert share(0.5) == half, "the draw is the turn's seed's"
    assert share(0.5, seed=2) != half


def test_a_pinned_version_is_what_it_is() -> None:
    assert share(1.0, versions={"policy": 4, "main": 4}) == [4] * TURNS


def test_the_draw_is_even_over_all_older_versions_and_none_where_there_is_none() -> None:
    chosen = [older_version(info(1, 2, 3, 7), Sampling(seed=n), lease(0.6)) for n in range(3000)]
    for version in (1, 2, 3):
        assert abs(chosen.count(version) / 3000 - 0.2) < 0.03
    assert 7 not in chosen
    assert {older_version(info(7), Sampling(seed=n), lease(1.0)) for n in range(50)} == {None}
    assert older_version(info(), Sampling(seed=1), lease(1.0)) is None


class Swapped(ScriptedEngine):
    """Holds an older version until it is asked for it."""

    def info(self) -> EngineInfo:
        return EngineInfo(policy="main", max_context=512, vocabulary=9, dtype="float32", versions=(2, 3))

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        if request.version is not None:
            self.asked.append(request)
            raise NotFound(f"version {request.version} is not held")
        return await super().generate(request)


async def one_turn(task: Task, agents: Agents) -> Reward:
    await agents["main"].chat([HI])
    return Reward(1.0)


def test_a_version_that_an_update_replaced_is_not_insisted_on() -> None:
    async def play(given: Lease) -> list[int | None]:
        made = Swapped(reply([5, 6]))
        await one_turn(given.task, EpisodeAgents(given, {"main": seat(made, character_template())}))
        return [request.version for request in made.asked]

    assert run_virtual(lambda: play(lease(1.0))) == [2, None]
    with pytest.raises(EngineFailed, match="version 2 is not held"):
        run_virtual(lambda: play(lease(0.0, versions={"policy": 2, "main": 2})))


# ── from Curate to the worker ──


def test_what_curate_says_is_in_every_lease_of_the_group_and_survives_a_restart() -> None:
    def spec() -> Any:
        return make_spec(curate=WithOlderVersions(Shuffled(tasks(), group_size=2), chance=0.25), max_staleness=2)

    with Rig(spec()) as rig:
        first = rig.leases(1)
        rig.restart(spec())
        assert [each.version_choice for each in (*first, *rig.leases(3))] == [0.25] * 4
        rig.balanced()
    with Rig(make_spec()) as rig:
        assert rig.leases(1)[0].version_choice == 0.0
        assert rig.db.number("SELECT COUNT(*) FROM version_choices") == 0


class Wild:
    def next(self) -> Admission:
        return Admission(task=Task(key="t"), episodes=2, version_choice=1.5)

    def observe(self, summary: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_a_chance_out_of_range_stops_the_run_or_is_refused_at_once() -> None:
    with Rig(make_spec(curate=Wild())) as rig, pytest.raises(RunFailed, match=r"version_choice 1.5; it must be in"):
        rig.lease(1)
    with pytest.raises(ConfigError, match=r"WithOlderVersions.chance must be in \[0, 1\], found -0.5"):
        WithOlderVersions(Shuffled(tasks(), group_size=2), chance=-0.5)


def test_conformance() -> None:
    made: Curate = WithOlderVersions(Shuffled(tasks(), group_size=2), chance=0.5)
    admission = made.next()
    assert admission is not None and admission.version_choice == 0.5
    check_algorithm(lambda: WithOlderVersions(Shuffled(tasks(), group_size=2), chance=0.5))
    assert WithOlderVersions(Shuffled(tasks(3), group_size=2, epochs=2), chance=0.5).groups == 6
    last = WithOlderVersions(Shuffled(tasks(1), group_size=2, epochs=1), chance=0.5)
    assert last.next() is not None
    assert last.next() is None
