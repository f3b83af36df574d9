"""Several debaters answer, read what the others said, and answer again; the majority of the last round is the answer.

After Du et al. 2023, "Improving Factuality and Reasoning in Language Models through Multiagent Debate" (2305.14325).

    debater   each answer: its own grade, compared with answers of the same round
    episode   the grade of the answer that most debaters end with; of a tie, the one that was given first
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from astraflow.errors import ConfigError
from astraflow.rollout.workflow import Agents, Message, Reply, Reward
from astraflow.types import Task
from astraflow.workflows.single_turn import Ask, Grade, prompt_of
from astraflow.workflows.truth import Truth, assistant, opening, user

OTHERS = "Others answered:\n{others}\n\nConsider that and answer again."


class Debate:
    """Role ``debater``: as many agents of it as ``debaters``, each with a history of its own."""

    def __init__(
        self,
        grade: Grade,
        *,
        ask: Ask = prompt_of,
        debaters: int = 2,
        rounds: int = 2,
        others: str = OTHERS,
        answer_of: Callable[[str], str] = str.strip,
    ) -> None:
        """``others`` is filled with others; ``answer_of`` makes two texts that say the same equal."""
        for name, value, least in (("debaters", debaters, 2), ("rounds", rounds, 1)):
            if value < least:
                raise ConfigError(f"Debate.{name} must be at least {least}, found {value}")
        self._truth = Truth(grade)
        self._ask = ask
        self._debaters = debaters
        self._rounds = rounds
        self._others = others
        self._answer_of = answer_of

    async def __call__(self, task: Task, agents: Agents) -> Reward:
        table = [agents["debater"], *(agents.spawn("debater") for _ in range(self._debaters - 1))]
        histories: list[list[Message]] = [opening(self._ask, task) for _ in table]
        turns: dict[int, float | None] = {}
        keys: dict[int, str] = {}
        said: list[Reply] = []
        for number in range(self._rounds):
            if said:
                histories = [self._next(history, said, at) for at, history in enumerate(histories)]
            said = await asyncio.gather(*(each.chat(h) for each, h in zip(table, histories, strict=True)))
            for reply in said:
                turns[reply.turn] = await self._truth.of(reply.text, task)
                keys[reply.turn] = f"debater/{number}"
        return Reward(turns[self._majority(said).turn], turns=turns, baseline_keys=keys)

    def _next(self, history: list[Message], said: Sequence[Reply], at: int) -> list[Message]:
        others = "\n".join(reply.text for number, reply in enumerate(said) if number != at)
        return [*history, assistant(said[at].text), user(self._others.format(others=others))]

    def _majority(self, said: Sequence[Reply]) -> Reply:
        votes = Counter(self._answer_of(reply.text) for reply in said)
        return max(said, key=lambda reply: votes[self._answer_of(reply.text)])
