"""One lease, one episode: run the workflow within its time limit and say how it ended. Never raises for user code.

Whose fault a failure is (F13) is decided here and nowhere else, by the first cause in the chain of exceptions.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, Protocol

from astraflow.clock import Clock, SystemClock
from astraflow.errors import BadRequest, EngineFailed, EnvFailed, EpisodeTruncated, GraderFailed
from astraflow.observe.waits import WAITING, Waiting
from astraflow.rollout.agents import PROMPT_TOO_LONG, EpisodeAgents, Hold, Seat, holds_newest_only
from astraflow.rollout.exits import EXITS, LEFT, Left, guard_tasks
from astraflow.rollout.features import features_of
from astraflow.rollout.loop_guard import PLAYING, is_library
from astraflow.rollout.said import sendable, words_of
from astraflow.rollout.score import UnknownName, resolve
from astraflow.rollout.settings import TreeLimits
from astraflow.rollout.workflow import Reward, Workflow
from astraflow.types import Episode, FailureKind, Lease, Outcome, Purpose, Sampling

_FAULTS: tuple[tuple[type[BaseException], FailureKind], ...] = (
    (EngineFailed, FailureKind.INFRA),
    (EnvFailed, FailureKind.ENV),
    (GraderFailed, FailureKind.GRADER),
)

_OURS = f"{Path(__file__).parents[1]}/"


class Player(Protocol):
    """Plays one leased episode to its end. Only its own bugs and cancelling come out as exceptions."""

    async def __call__(self, lease: Lease) -> Episode: ...


@dataclass(kw_only=True, slots=True)
class WorkflowPlayer:
    """Plays a workflow with agents on engines."""

    workflow: Workflow
    seats: Mapping[str, Seat]
    """Role → what plays it in training."""
    recast: Callable[[Mapping[str, str]], Mapping[str, Seat]] | None = None
    """The seats of another cast than the recipe's: role → policy."""
    eval_sampling: Mapping[str, Sampling] = field(default_factory=dict)
    """Role → sampling of evaluation episodes; a role not named: its own with temperature 0."""
    max_turns: int = 64
    tree: TreeLimits = field(default_factory=TreeLimits)
    cancel_grace_s: float = 5.0
    hold: Hold = holds_newest_only
    clock: Clock = field(default_factory=SystemClock)
    waiting: Waiting = lambda _: nullcontext()
    """Told of every wait for an engine or a grader."""
    abandoned: set[asyncio.Task[Reward]] = field(default_factory=set)
    """Workflows that did not end although they were cancelled."""

    async def __call__(self, lease: Lease) -> Episode:
        began = self.clock.monotonic()
        agents = EpisodeAgents(
            lease,
            self._seats_for(lease),
            max_turns=self.max_turns,
            tree=self.tree,
            hold=self.hold,
            waiting=self.waiting,
        )
        loop = asyncio.get_running_loop()
        guard_tasks(loop)
        left: Left = loop.create_future()
        running = asyncio.ensure_future(self._run(lease, agents, left))
        try:
            limit_s = lease.time_limit_s
            ends: list[asyncio.Future[Any]] = [running, left]
            done, _ = await asyncio.wait(ends, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if left in done:
                kind, message = classify(left.result())
                return failed(lease, kind, message, wall_s=self.clock.monotonic() - began)
            if not done:
                message = f"the workflow did not return within {limit_s:g} s"
                if not await self._end(running):
                    message += " and ignores its cancellation"
                return failed(lease, FailureKind.TIMEOUT, message, wall_s=self.clock.monotonic() - began)
            return self._episode(lease, agents, running, self.clock.monotonic() - began)
        finally:
            if await self._end(running) and not running.cancelled():
                running.exception()  # seen, also where the lease was lost and nobody reads the result
            await agents.close()

    def _seats_for(self, lease: Lease) -> dict[str, Seat]:
        if lease.roles and self.recast is None:
            raise EngineFailed("this worker plays the recipe's cast only")
        cast = self.recast(lease.roles) if lease.roles and self.recast is not None else self.seats
        if lease.purpose is not Purpose.EVAL:
            return dict(cast)
        seats = {}
        for role, seat in cast.items():
            sampling = self.eval_sampling.get(role) or greedy(seat.sampling)
            seats[role] = Seat(policy=seat.policy, engine=seat.engine, template=seat.template, sampling=sampling)
        return seats

    async def _run(self, lease: Lease, agents: EpisodeAgents, left: Left) -> Reward:
        PLAYING.set(lease.id)
        LEFT.set(left)
        WAITING.set(self.waiting)
        try:
            return await self.workflow(lease.task, agents)
        except EXITS as error:  # a task hands them on to the event loop: the worker and all its episodes would end
            raise RuntimeError("the workflow ended the process") from error

    async def _end(self, running: asyncio.Task[Reward]) -> bool:
        """Cancel the workflow; False if it does not end within the grace: it is then left to itself and counted."""
        if running.done() or running in self.abandoned:
            return running.done()
        running.cancel()
        await asyncio.wait({running}, timeout=self.cancel_grace_s)
        if running.done():
            return True
        self.abandoned.add(running)
        running.add_done_callback(self._forget)
        return False

    def _forget(self, task: asyncio.Task[Reward]) -> None:
        self.abandoned.discard(task)
        if not task.cancelled():
            task.exception()  # seen: its episode was reported as timed out already

    def _episode(self, lease: Lease, agents: EpisodeAgents, running: asyncio.Task[Reward], wall_s: float) -> Episode:
        try:
            reward = running.result()
            scored = resolve(reward, agents.trajectories, roles=agents.roles)
            features = features_of(reward.features, scored.trajectories)
        except asyncio.CancelledError:
            return failed(
                lease,
                FailureKind.WORKFLOW,
                "the workflow cancelled itself, or awaited what was cancelled",
                wall_s=wall_s,
            )
        except BaseException as error:  # noqa: BLE001 - whatever user code raises is a failed episode, not a dead worker
            limit = agents.cut or agents.refused
            if limit is not None and first_of(error, (EpisodeTruncated,)) is not None:
                return _truncated(lease, agents, limit, wall_s)
            kind, message = classify(error)
            if running.exception() is None:  # it is what the workflow returned
                message += _defined(self.workflow)
            return failed(lease, kind, message, wall_s=wall_s)
        return Episode(
            task_key=lease.task.key,
            outcome=Outcome.TRUNCATED if agents.cut is not None else Outcome.COMPLETED,
            trajectories=scored.trajectories,
            score=scored.score,
            features=features,
            wall_s=wall_s,
        )


def _truncated(lease: Lease, agents: EpisodeAgents, limit: str, wall_s: float) -> Episode:
    """The workflow let EpisodeTruncated (or SpawnRefused) pass: its turns stand, none is scored."""
    return Episode(
        task_key=lease.task.key,
        outcome=Outcome.TRUNCATED,
        trajectories=agents.trajectories,
        error=limit,
        wall_s=wall_s,
    )


def failed(lease: Lease, kind: FailureKind, message: str, *, wall_s: float = 0.0) -> Episode:
    """An episode that could not be played; final where the prompt itself is too long, for it stays that (F28)."""
    final = message.startswith(PROMPT_TOO_LONG)
    if final:
        message = f"{message}: task {lease.task.key[:80]!r} of {lease.task.dataset[:80]!r} is too long"
    return Episode(
        task_key=lease.task.key,
        outcome=Outcome.FAILED,
        failure=kind,
        error=sendable(message)[:2000],
        final=final,
        wall_s=wall_s,
    )


def greedy(sampling: Sampling) -> Sampling:
    return Sampling(
        max_tokens=sampling.max_tokens,
        temperature=0.0,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
    )


def classify(error: BaseException) -> tuple[FailureKind, str]:
    """Whose fault, and the first cause in one sentence: user code may wrap what it got from us."""
    for fault, kind in _FAULTS:
        found = first_of(error, (fault,))
        if found is not None:
            return kind, str(found)
    found = first_of(error, (UnknownName, BadRequest))
    if found is not None:
        has_place = isinstance(found, BadRequest) and not str(found).startswith(PROMPT_TOO_LONG)
        return FailureKind.WORKFLOW, f"{found}{own_line(found) if has_place else ''}"
    # That something was cancelled is how a time limit of the workflow's own comes about, and no cause.
    cause = next((each for each in reversed(causes(error)) if not isinstance(each, asyncio.CancelledError)), error)
    return FailureKind.WORKFLOW, f"{words_of(cause)}{own_line(cause)}"


def first_of(error: BaseException, kinds: Sequence[type[BaseException]] | tuple[Any, ...]) -> BaseException | None:
    return next((cause for cause in causes(error) if isinstance(cause, tuple(kinds))), None)


def causes(error: BaseException) -> list[BaseException]:
    """The error and what it came from, the first cause last; the members of groups included."""
    found: list[BaseException] = []
    todo = [error]
    while todo:
        each = todo.pop(0)
        if any(each is seen for seen in found):
            continue
        found.append(each)
        if isinstance(each, BaseExceptionGroup):
            todo += each.exceptions
        origin = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
        if origin is not None:
            todo.append(origin)
    return found


def own_line(error: BaseException) -> str:
    """The innermost line that its user wrote: where he called what refused him. None there: of a workflow that comes
    with us, else simply the innermost."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [at for at in frames if not is_library(at[0].co_filename) and not at[0].co_filename.startswith(_OURS)]
    shipped = [at for at in frames if at[0].co_filename.startswith(f"{_OURS}workflows/")]
    return _words(*(own or shipped or frames)[-1]) if frames else ""


def _defined(workflow: object) -> str:
    """Where a workflow begins, of which nothing better is known."""
    call = workflow if inspect.isroutine(workflow) else type(workflow).__call__
    code = getattr(call, "__code__", None)
    return "" if code is None else _words(code, code.co_firstlineno)


def _words(code: CodeType, line: int) -> str:
    return f" ({code.co_filename.rsplit('/', 1)[-1]}:{line} in {code.co_name})"
