"""One episode: how it ends, and whose fault it is."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from astraflow.errors import BadRequest, EnvFailed, EpisodeOver, EpisodeTruncated, GraderFailed, Unavailable
from astraflow.rollout.agents import EpisodeAgents, call_seed
from astraflow.rollout.play import WorkflowPlayer
from astraflow.rollout.template import ChatTemplate
from astraflow.rollout.workflow import Agents, Reward
from astraflow.testing.fake_engine import FakeEngine
from astraflow.testing.virtual_loop import run_virtual
from astraflow.types import Episode, FailureKind, Manifest, Outcome, Purpose, Sampling, StopReason, Task
from tests.unit.rollout.doubles import END, ScriptedEngine, lease, play, reply, seat

HI = {"role": "user", "content": "hi"}
OK = [5, END]


async def one_turn(task: Task, agents: Agents) -> Reward:
    await agents["main"].chat([HI])
    return Reward(1.0)


def ended(workflow: Any, *replies: Any, template: ChatTemplate, roles: tuple[str, ...] = ("main",)) -> Episode:
    return run_virtual(lambda: play(workflow, ScriptedEngine(*replies), template, roles=roles))


def test_a_completed_episode(smollm2: ChatTemplate) -> None:
    episode = ended(one_turn, reply(OK), template=smollm2)
    assert (episode.outcome, episode.failure, episode.score) == (Outcome.COMPLETED, None, 1.0)
    (trajectory,) = episode.trajectories
    assert (trajectory.agent, trajectory.role, trajectory.policy) == ("main", "main", "main")
    assert [turn.reward for turn in trajectory.turns] == [1.0]


def raising(error: BaseException) -> Any:
    async def workflow(task: Task, agents: Agents) -> Reward:
        await agents["main"].chat([HI])
        raise error

    return workflow


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("a bug"), FailureKind.WORKFLOW),
        (TimeoutError("their own"), FailureKind.WORKFLOW),
        (EnvFailed("the browser died"), FailureKind.ENV),
        (GraderFailed("no verdict"), FailureKind.GRADER),
        (ExceptionGroup("two", [KeyError("x"), EnvFailed("the browser died")]), FailureKind.ENV),
    ],
)
def test_f13_a_failure_has_its_cause_and_no_reward(
    smollm2: ChatTemplate, error: BaseException, kind: FailureKind
) -> None:
    episode = ended(raising(error), reply(OK), template=smollm2)
    assert (episode.outcome, episode.failure, episode.score) == (Outcome.FAILED, kind, None)
    assert not episode.trajectories and not episode.final


def test_a_workflow_that_ends_the_process_ends_its_episode_only(smollm2: ChatTemplate) -> None:
    """SystemExit leaves a task for the event loop: it would take the worker and all its episodes along."""

    async def leaves(task: Task, agents: Agents) -> Reward:
        await agents["main"].chat([HI])
        sys.exit(3)

    episode = ended(leaves, reply(OK), template=smollm2)
    assert (episode.outcome, episode.failure) == (Outcome.FAILED, FailureKind.WORKFLOW)
    assert episode.error is not None
    assert episode.error.startswith("SystemExit: 3") and "test_play.py" in episode.error


def test_the_first_cause_is_named_with_its_place(smollm2: ChatTemplate) -> None:
    async def workflow(task: Task, agents: Agents) -> Reward:
        try:
            raise KeyError("the first")
        except KeyError as error:
            raise RuntimeError("the second") from error

    episode = ended(workflow, template=smollm2)
    assert episode.error is not None
    assert "KeyError: 'the first'" in episode.error and "test_play.py" in episode.error


@pytest.mark.parametrize(
    "error", [Unavailable("no engine"), OSError("gone"), ConnectionError("reset"), BadRequest("?")]
)
def test_f13_an_engine_s_error_is_infra_even_if_user_code_wraps_it(smollm2: ChatTemplate, error: Exception) -> None:
    async def workflow(task: Task, agents: Agents) -> Reward:
        try:
            await agents["main"].chat([HI])
        except Exception as caught:
            raise RuntimeError("my agent framework gave up") from caught
        return Reward(1.0)

    episode = ended(workflow, error, template=smollm2)
    assert (episode.outcome, episode.failure) == (Outcome.FAILED, FailureKind.INFRA)
    assert episode.error is not None and str(error) in episode.error


def test_f31_a_workflow_s_own_retry_records_only_what_counts(smollm2: ChatTemplate) -> None:
    async def workflow(task: Task, agents: Agents) -> Reward:
        with pytest.raises(Exception, match="reset"):
            await agents["main"].chat([HI])
        await agents["main"].chat([HI])
        return Reward(1.0)

    episode = ended(workflow, ConnectionError("reset"), reply([5], logprobs=[-0.4]), template=smollm2)
    (sample,) = episode.trajectories[0].samples
    assert sample.tokens[sample.sampled].tolist() == [5]
    assert sample.logprobs[sample.sampled].tolist() == pytest.approx([-0.4])


@pytest.mark.parametrize("returned", [None, 1.0, Reward(float("nan")), Reward("1"), Reward()])  # type: ignore[arg-type]
def test_no_proper_reward_is_the_grader_s_failure(smollm2: ChatTemplate, returned: Any) -> None:
    async def workflow(task: Task, agents: Agents) -> Any:
        await agents["main"].chat([HI])
        return returned

    assert ended(workflow, reply(OK), template=smollm2).failure is FailureKind.GRADER


def test_an_unknown_role_is_the_workflow_s_failure(smollm2: ChatTemplate) -> None:
    async def asks(task: Task, agents: Agents) -> Reward:
        await agents["solvr"].chat([HI])
        return Reward(1.0)

    async def pays(task: Task, agents: Agents) -> Reward:
        return Reward(solvr=1.0)

    for workflow in (asks, pays):
        episode = ended(workflow, template=smollm2, roles=("solver", "verifier"))
        assert episode.failure is FailureKind.WORKFLOW
        assert episode.error is not None and "solver, verifier" in episode.error


def test_f26_a_cut_reply_may_be_graded(smollm2: ChatTemplate) -> None:
    episode = ended(one_turn, reply([5, 6], stop=StopReason.LENGTH), template=smollm2)
    assert (episode.outcome, episode.score) == (Outcome.TRUNCATED, 1.0)


def test_f26_no_turn_follows_a_cut_turn(smollm2: ChatTemplate) -> None:
    async def two_turns(task: Task, agents: Agents) -> Reward:
        first = await agents["main"].chat([HI])
        await agents["main"].chat([HI, {"role": "assistant", "content": first.text}, HI])
        return Reward(1.0)

    episode = ended(two_turns, reply([5, 6], stop=StopReason.LENGTH), reply(OK), template=smollm2)
    assert (episode.outcome, episode.failure, episode.score) == (Outcome.TRUNCATED, None, None)
    (trajectory,) = episode.trajectories
    assert [turn.reward for turn in trajectory.turns] == [None]
    assert trajectory.samples[0].tokens[trajectory.samples[0].sampled].tolist() == [5, 6]


def test_f26_a_workflow_may_catch_it_and_grade(smollm2: ChatTemplate) -> None:
    async def catches(task: Task, agents: Agents) -> Reward:
        await agents["main"].chat([HI])
        with pytest.raises(EpisodeTruncated):
            await agents["other"].chat([HI])
        return Reward(main=0.0)

    episode = ended(catches, reply([5, 6], stop=StopReason.LENGTH), template=smollm2, roles=("main", "other"))
    assert (episode.outcome, episode.score) == (Outcome.TRUNCATED, 0.0)


def test_the_turn_limit_truncates(smollm2: ChatTemplate) -> None:
    async def forever(task: Task, agents: Agents) -> Reward:
        while True:
            await agents["main"].chat([HI])

    async def main() -> Episode:
        engine = ScriptedEngine(*[reply(OK)] * 3)
        player = WorkflowPlayer(workflow=forever, seats={"main": seat(engine, smollm2)}, max_turns=3)
        return await player(lease())

    episode = run_virtual(main)
    assert episode.outcome is Outcome.TRUNCATED
    assert len(episode.trajectories[0].turns) == 3


@pytest.mark.parametrize(("room", "wanted"), [(6, 6), (8, 8), (100, 8)])
def test_f28_a_reply_gets_what_the_context_leaves(smollm2: ChatTemplate, room: int, wanted: int) -> None:
    async def main() -> int:
        prompt = len(smollm2.encode(smollm2.render([HI])))
        engine = ScriptedEngine(reply(OK), max_context=prompt + room)
        await play(one_turn, engine, smollm2)
        return engine.asked[0].sampling.max_tokens

    assert run_virtual(main) == wanted


def test_f28_a_prompt_without_room_is_rejected_once(smollm2: ChatTemplate) -> None:
    async def main() -> tuple[Episode, int]:
        engine = ScriptedEngine(reply(OK), max_context=len(smollm2.encode(smollm2.render([HI]))))
        return await play(one_turn, engine, smollm2), len(engine.asked)

    episode, asked = run_virtual(main)
    assert asked == 0 and episode.failure is FailureKind.WORKFLOW and episode.final
    assert episode.error is not None and episode.error.startswith("prompt_too_long: ")


def test_f28_what_the_engine_finds_too_long_is_final_too(smollm2: ChatTemplate) -> None:
    episode = ended(one_turn, BadRequest("prompt_too_long: 9 tokens leave no room"), template=smollm2)
    assert episode.failure is FailureKind.WORKFLOW and episode.final


def test_f28_a_conversation_that_fills_the_context_is_truncated(smollm2: ChatTemplate) -> None:
    async def talks(task: Task, agents: Agents) -> Reward:
        history = [HI]
        while True:
            said = await agents["main"].chat(history)
            history = [*history, {"role": "assistant", "content": said.text}, HI]

    async def main() -> Episode:
        context = len(smollm2.encode(smollm2.render([HI]))) + 5
        return await play(talks, ScriptedEngine(*[reply(OK)] * 9, max_context=context), smollm2)

    episode = run_virtual(main)
    assert (episode.outcome, episode.failure) == (Outcome.TRUNCATED, None)


def test_f65_every_call_has_its_own_seed(smollm2: ChatTemplate) -> None:
    async def seeds(lease_seed: int) -> list[int | None]:
        async def two(task: Task, agents: Agents) -> Reward:
            await agents["main"].chat([HI])
            await agents["main"].chat([HI])
            return Reward(1.0)

        engine = ScriptedEngine(reply(OK), reply(OK))
        player = WorkflowPlayer(workflow=two, seats={"main": seat(engine, smollm2)})
        await player(lease(seed=lease_seed))
        return [request.sampling.seed for request in engine.asked]

    found = [seed for index in range(4) for seed in run_virtual(lambda index=index: seeds(index))]
    assert len(set(found)) == 8 and None not in found
    assert found[:2] == [call_seed(0, "main", 0), call_seed(0, "main", 1)] == run_virtual(lambda: seeds(0))
    assert all(0 <= call_seed(2**62, "main", turn) < 2**63 for turn in range(100))


def test_evaluation_is_greedy_and_at_its_version(smollm2: ChatTemplate) -> None:
    async def main(**fields: Any) -> Any:
        engine = ScriptedEngine(reply(OK))
        player = WorkflowPlayer(workflow=one_turn, seats={"main": seat(engine, smollm2)}, **fields)
        await player(lease(purpose=Purpose.EVAL, versions={"main": 3}))
        return engine.asked[0]

    request = run_virtual(main)
    assert (request.sampling.temperature, request.version, request.prefix_group) == (0.0, 3, "1")
    warm = Sampling(temperature=0.5, max_tokens=4)
    assert run_virtual(lambda: main(eval_sampling={"main": warm})).sampling.temperature == 0.5


def test_a_version_that_is_not_held_is_asked_for(smollm2: ChatTemplate) -> None:
    asked: list[tuple[str, int]] = []

    async def hold(policy: str, version: int) -> None:
        asked.append((policy, version))

    async def main(**fields: Any) -> Episode:
        player = WorkflowPlayer(workflow=one_turn, seats={"main": seat(ScriptedEngine(reply(OK)), smollm2)}, **fields)
        return await player(lease(versions={"main": 1}))

    assert run_virtual(lambda: main(hold=hold)).outcome is Outcome.COMPLETED
    assert asked == [("main", 1)]
    assert run_virtual(main).failure is FailureKind.INFRA


def test_a_workflow_that_never_returns_times_out(smollm2: ChatTemplate) -> None:
    async def hangs(task: Task, agents: Agents) -> Reward:
        await asyncio.Event().wait()
        return Reward(1.0)

    episode = ended(hangs, template=smollm2)
    assert (episode.outcome, episode.failure) == (Outcome.FAILED, FailureKind.TIMEOUT)
    assert episode.wall_s < 60 and "did not return within 600 s" in str(episode.error)


def test_a_workflow_that_ignores_its_cancellation_is_left_behind(smollm2: ChatTemplate) -> None:
    async def stubborn(task: Task, agents: Agents) -> Reward:
        until = asyncio.get_running_loop().time() + 2000
        while asyncio.get_running_loop().time() < until:
            try:
                await asyncio.sleep(2000)
            except asyncio.CancelledError:
                continue
        return Reward(1.0)

    async def main() -> tuple[Episode, int, float, int]:
        player = WorkflowPlayer(workflow=stubborn, seats={}, cancel_grace_s=5.0)
        episode = await player(lease(time_limit_s=10.0))
        took, left = asyncio.get_running_loop().time(), len(player.abandoned)
        await asyncio.sleep(3000)
        return episode, left, took, len(player.abandoned)

    episode, left, took, later = run_virtual(main)
    assert episode.failure is FailureKind.TIMEOUT and "ignores its cancellation" in str(episode.error)
    assert (left, later) == (1, 0) and took == pytest.approx(15.0)


def test_f81_what_a_workflow_leaves_running_ends_with_it(smollm2: ChatTemplate) -> None:
    outcomes: list[str] = []

    class Slow(ScriptedEngine):
        async def generate(self, request: Any) -> Any:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                outcomes.append("engine call cancelled")
                raise

    async def leaves(task: Task, agents: Agents) -> Reward:
        async def asks() -> None:
            try:
                await agents["main"].chat([HI])
            except asyncio.CancelledError:
                outcomes.append("chat cancelled")

        agents.kept = asyncio.ensure_future(asks())  # type: ignore[attr-defined]
        await asyncio.sleep(1)
        raise ValueError("gone")

    async def main() -> Episode:
        episode = await play(leaves, Slow(), smollm2)
        await asyncio.sleep(0.1)
        assert len(asyncio.all_tasks()) == 1
        return episode

    assert run_virtual(main).failure is FailureKind.WORKFLOW
    assert sorted(outcomes) == ["chat cancelled", "engine call cancelled"]


def test_agents_of_an_ended_episode_answer_no_more(smollm2: ChatTemplate) -> None:
    async def main() -> None:
        agents = EpisodeAgents(lease(), {"main": seat(ScriptedEngine(reply(OK)), smollm2)})
        await agents.close()
        with pytest.raises(EpisodeOver, match="1/0/1 is over"):
            await agents["main"].chat([HI])

    run_virtual(main)


def test_spawned_agents_are_children_of_the_latest_turn(smollm2: ChatTemplate) -> None:
    async def spawns(task: Task, agents: Agents) -> Reward:
        await agents["main"].chat([HI])
        for _ in range(2):
            await agents.spawn("main").chat([HI])
        return Reward(1.0)

    episode = ended(spawns, *[reply(OK)] * 3, template=smollm2)
    found = [(each.agent, each.role, each.turns[0].index, each.turns[0].parent) for each in episode.trajectories]
    assert found == [("main", "main", 0, None), ("main#2", "main", 1, 0), ("main#3", "main", 2, 1)]


def test_a_cancelled_reply_is_no_reply(smollm2: ChatTemplate) -> None:
    episode = ended(one_turn, reply([5], stop=StopReason.CANCELLED), template=smollm2)
    assert episode.failure is FailureKind.INFRA


def test_f83_a_tree_of_agents_on_two_slots_ends(smollm2: ChatTemplate) -> None:
    """A slot is held while a reply is generated, never while an agent waits for those that it has spawned."""
    engine = FakeEngine(policy="main", slots=2, vocabulary=64, tick_s=0.01, end_id=END, end_chance=1.0)
    most = 0

    async def solve(agents: Agents, depth: int) -> int:
        nonlocal most
        await agents.spawn("main").chat([HI])
        most = max(most, engine.busy)
        if depth == 3:
            return 1
        return 1 + sum(await asyncio.gather(*(solve(agents, depth + 1) for _ in range(2))))

    async def tree(task: Task, agents: Agents) -> Reward:
        assert await solve(agents, 1) == 7
        return Reward(1.0)

    async def main() -> Episode:
        await engine.start()
        await engine.load(Manifest(policy="main", version=0, digest="d0", files=()), [])
        async with asyncio.timeout(60):
            return await play(tree, engine, smollm2)

    episode = run_virtual(main)
    assert episode.outcome is Outcome.COMPLETED, episode.error
    assert len(episode.trajectories) == 7
    assert most <= 2 and engine.busy == 0
