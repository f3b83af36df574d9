"""One question, one answer, one grade: the simplest workflow."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from astraflow.rewards.limit import TimeLimit
from astraflow.rollout.workflow import Agents, Message, Reply, Reward
from astraflow.types import Task

Grade = Callable[[str, Task], float | None] | Callable[[str, Task], Awaitable[float | None]]
"""``(the reply's text, task) → reward``; None is not scored. Raising means that it could not be graded, never zero."""

Form = Callable[[str], bool]
"""``the reply's text → `` whether it is well formed: ``has_answer`` of ``rewards.answer``, for one."""

Shape = Callable[[float, int], float]
"""``(grade, tokens of the reply) → reward``"""

Ask = Callable[[Task], str | Sequence[Message]]
"""``task → `` the user's message, or the whole history."""


def prompt_of(task: Task) -> str:
    """The task's ``prompt``."""
    return str(task.payload["prompt"])


class SingleTurn:
    def __init__(
        self,
        grade: Grade,
        *,
        ask: Ask = prompt_of,
        system: str | None = None,
        role: str = "main",
        grade_limit_s: float = 10.0,
        form: Form | None = None,
        shape: Shape | None = None,
    ) -> None:
        """``grade`` runs in a thread (or is awaited if it is a coroutine function) for at most ``grade_limit_s``.
        ``form``: told as the feature ``format``, for the Keep that masks ill-formed replies.
        ``shape``: what the grade becomes by the reply's length, ``rewards.overlong.SoftOverlong`` for example."""
        self._grade = grade
        self._form = form
        self._shape = shape
        self._ask = ask
        self._system = system
        self._role = role
        self._limit = TimeLimit(grade_limit_s)

    async def __call__(self, task: Task, agents: Agents) -> Reward:
        reply = await agents[self._role].chat(self.messages(task))
        reward = await self._graded(reply, task)
        if self._form is None:
            return Reward(turns={reply.turn: reward})
        well_formed = await self._limit.run(self._form, reply.text)
        return Reward(turns={reply.turn: reward}, features={"format": float(well_formed)})

    def messages(self, task: Task) -> list[Message]:
        asked = self._ask(task)
        history: list[Message] = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        return [{"role": "system", "content": self._system}, *history] if self._system is not None else history

    async def _graded(self, reply: Reply, task: Task) -> float | None:
        grade = await self._limit.run(self._grade, reply.text, task)
        return grade if grade is None or self._shape is None else self._shape(grade, len(reply.tokens))
