"""An agent that acts in an environment by its replies, turn by turn, until the environment says that it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from astraflow.errors import EnvFailed, EpisodeError
from astraflow.rollout.workflow import Agents, Message, Reward
from astraflow.types import Task

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What the environment shows after a reply."""

    text: str = ""
    done: bool = False
    reward: float | None = None
    """Of the episode, known when ``done``; None: not scored."""
    role: str = "user"
    """Of the message that carries ``text``: ``tool`` where the chat template knows it."""


class Environment(Protocol):
    async def reset(self) -> str:
        """The first message."""

    async def step(self, action: str) -> Observation:
        """What follows from a reply. A model's blunder is an observation, not an exception."""

    async def close(self) -> None: ...


class ChatLoop:
    """``make(task)`` opens the task's environment; it is closed however the episode ends.

    An exception of the environment is ``failed(env)``. A reply that was cut, or ``max_turns`` without an end, gives
    ``unfinished`` as the reward.
    """

    def __init__(
        self,
        make: Callable[[Task], Awaitable[Environment]],
        *,
        system: str | None = None,
        role: str = "main",
        max_turns: int = 16,
        unfinished: float | None = 0.0,
    ) -> None:
        self._make = make
        self._system = system
        self._role = role
        self._max_turns = max_turns
        self._unfinished = unfinished

    async def __call__(self, task: Task, agents: Agents) -> Reward:
        environment = await _of_environment(self._make(task))
        try:
            return await self._play(environment, agents)
        finally:
            await _of_environment(environment.close())

    async def _play(self, environment: Environment, agents: Agents) -> Reward:
        history: list[Message] = [] if self._system is None else [{"role": "system", "content": self._system}]
        history.append({"role": "user", "content": await _of_environment(environment.reset())})
        for _ in range(self._max_turns):
            reply = await agents[self._role].chat(history)
            if reply.truncated:
                break
            seen = await _of_environment(environment.step(reply.text))
            if seen.done:
                return self._reward(seen.reward)
            history += [{"role": "assistant", "content": reply.text}, {"role": seen.role, "content": seen.text}]
        return self._reward(self._unfinished)

    def _reward(self, value: float | None) -> Reward:
        reward = Reward()
        reward.roles[self._role] = value
        return reward


async def _of_environment(call: Awaitable[T]) -> T:
    try:
        return await call
    except (EpisodeError, asyncio.CancelledError, GeneratorExit):
        raise
    except (
        BaseException
    ) as error:  # the user's environment may raise anything: it is env's failure, told with its cause
        raise EnvFailed(f"{type(error).__name__}: {error}") from error
