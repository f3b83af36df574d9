"""A router sends each question to one of several solvers, cheapest first. All of them answer, so that it can be told
what the router's choice was worth; only the chosen answer counts.

    router    1 for the cheapest solver that is right; 0 for a dearer or a wrong one, and for no choice; 0.5 for any
              choice where none is right
    solvers   each its own grade
    episode   the grade of the chosen solver; no choice: 0
"""

from __future__ import annotations

import asyncio

from astraflow.errors import ConfigError
from astraflow.rollout.workflow import Agents, Reward
from astraflow.types import Task
from astraflow.workflows.single_turn import Ask, Grade, prompt_of
from astraflow.workflows.truth import Truth, last_word, opening, question_of, user

ROUTE = "{question}\n\nDo not answer: which model is needed, of {choices}? End with that one word."


class SmallLargeRouter:
    """Role ``router``, and one role for each of ``solvers``, from the cheapest to the dearest."""

    def __init__(
        self,
        grade: Grade,
        *,
        ask: Ask = prompt_of,
        solvers: tuple[str, ...] = ("small", "large"),
        words: tuple[str, ...] | None = None,
        route: str = ROUTE,
        passing: float = 1.0,
    ) -> None:
        """``words``: what the router says for each; None: the roles. ``route`` is filled with question and choices."""
        said = solvers if words is None else words
        if len(solvers) < 2 or len(said) != len(solvers) or len({word.lower() for word in said}) != len(said):
            raise ConfigError(f"SmallLargeRouter takes two solvers or more, each with a word, found {solvers}, {said}")
        self._truth = Truth(grade, passing=passing)
        self._ask = ask
        self._solvers = solvers
        self._words = said
        self._route = route

    async def __call__(self, task: Task, agents: Agents) -> Reward:
        asked = self._route.format(question=question_of(self._ask, task), choices=", ".join(self._words))
        history = opening(self._ask, task)
        route, *answers = await asyncio.gather(
            agents["router"].chat([user(asked)]), *(agents[role].chat(history) for role in self._solvers)
        )
        grades = [await self._truth.of(answer.text, task) for answer in answers]
        word = last_word(route.text, self._words)
        choice = None if word is None else self._words.index(word)
        turns = {answer.turn: grade for answer, grade in zip(answers, grades, strict=True)}
        turns[route.turn] = self._router(choice, [self._truth.is_right(grade) for grade in grades])
        return Reward(0.0 if choice is None else grades[choice], turns=turns)

    def _router(self, choice: int | None, right: list[bool | None]) -> float | None:
        if None in right:
            return None
        if choice is None:
            return 0.0
        return float(choice == right.index(True)) if True in right else 0.5
