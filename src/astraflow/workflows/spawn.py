"""A root splits its work over sub-agents, which may split theirs in their turn; each joins what comes back.

Everybody is paid for the root's answer, as one team, and compared with agents of the same depth. Depth, children and
number of agents are the recipe's (``RolloutSettings.tree``): who may spawn no more is told to answer alone. No slot of
the engine is held while an agent waits for its children, so that a tree of any shape ends (F83).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

from astraflow.errors import SpawnRefused
from astraflow.rollout.workflow import Agent, Agents, Reward
from astraflow.types import Task
from astraflow.workflows.single_turn import Ask, Grade, prompt_of
from astraflow.workflows.truth import Truth, assistant, question_of, user

SPLIT = "{question}\n\nAnswer, or split the work: one line '{mark} QUESTION' for each part that another should do."
JOIN = "The parts came back:\n{answers}\n\nNow answer the question."
ALONE = "Nobody else can help: answer the question yourself."


class Spawn:
    """Roles ``root`` and ``worker``."""

    def __init__(
        self,
        grade: Grade,
        *,
        ask: Ask = prompt_of,
        mark: str = "ask:",
        split: str = SPLIT,
        join: str = JOIN,
        alone: str = ALONE,
    ) -> None:
        """``split`` is filled with question and mark, ``join`` with answers. A line that begins with ``mark`` is a
        part of the work."""
        self._truth = Truth(grade)
        self._ask = ask
        self._mark = mark
        self._split = split
        self._join = join
        self._alone = alone

    async def __call__(self, task: Task, agents: Agents) -> Reward:
        depths: dict[int, int] = {}
        answer = await self._solve(agents["root"], question_of(self._ask, task), 0, depths)
        grade = await self._truth.of(answer, task)
        keys = {turn: f"worker/{depth}" for turn, depth in depths.items() if depth}
        return Reward(grade, turns=dict.fromkeys(depths, grade), baseline_keys=keys)

    async def _solve(self, agent: Agent, question: str, depth: int, depths: dict[int, int]) -> str:
        history = [user(self._split.format(question=question, mark=self._mark))]
        reply = await agent.chat(history)
        depths[reply.turn] = depth
        parts = [line.removeprefix(self._mark).strip() for line in reply.text.splitlines() if self._is_part(line)]
        if not parts:
            return reply.text
        children = list(_children(agent, len(parts)))
        work = [self._solve(each, part, depth + 1, depths) for each, part in zip(children, parts, strict=False)]
        answers = "\n".join(await asyncio.gather(*work))
        asked = self._join.format(answers=answers) if children else self._alone
        last = await agent.chat([*history, assistant(reply.text), user(asked)])
        depths[last.turn] = depth
        return last.text

    def _is_part(self, line: str) -> bool:
        return line.startswith(self._mark)


def _children(agent: Agent, wanted: int) -> Iterator[Agent]:
    """As many as the limits of the tree allow: what cannot be handed on is not."""
    with suppress(SpawnRefused):
        for _ in range(wanted):
            yield agent.spawn("worker")
