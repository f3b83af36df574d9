"""A solver makes two attempts, a selector picks one.

solver    each attempt: its own grade
selector  both right or both wrong: 0.5; else 1 for picking the right one, 0 for the wrong one; no pick: 0
episode   the grade of the picked attempt; no pick: 0
"""

from __future__ import annotations

import asyncio

from astraflow.rollout.workflow import Agents, Reward
from astraflow.types import Task
from astraflow.workflows.single_turn import Ask, Grade, prompt_of
from astraflow.workflows.truth import Truth, last_word, opening, question_of, two_words, user

SELECT = (
    "{question}\n\nAttempt {first}:\n{one}\n\nAttempt {second}:\n{two}\n\n"
    "Which one is right? End with {first} or {second}."
)


class SolveAndSelect:
    """Roles ``solver`` and ``selector``."""

    def __init__(
        self,
        grade: Grade,
        *,
        ask: Ask = prompt_of,
        words: tuple[str, str] = ("1", "2"),
        select: str = SELECT,
        passing: float = 1.0,
    ) -> None:
        """``select`` is filled with question, one, two (the attempts), first, second (their words)."""
        self._truth = Truth(grade, passing=passing)
        self._ask = ask
        self._words = two_words(words, what="SolveAndSelect.words")
        self._select = select

    async def __call__(self, task: Task, agents: Agents) -> Reward:
        history = opening(self._ask, task)
        one, two = await asyncio.gather(*(agents["solver"].chat(history) for _ in range(2)))
        first, second = self._words
        question = question_of(self._ask, task)
        asked = self._select.format(question=question, one=one.text, two=two.text, first=first, second=second)
        picked = await agents["selector"].chat([user(asked)])
        grades = [await self._truth.of(attempt.text, task) for attempt in (one, two)]
        word = last_word(picked.text, self._words)
        pick = None if word is None else self._words.index(word)
        turns = {one.turn: grades[0], two.turn: grades[1], picked.turn: self._selector(pick, grades)}
        return Reward(0.0 if pick is None else grades[pick], turns=turns)

    def _selector(self, pick: int | None, grades: list[float | None]) -> float | None:
        right = [self._truth.is_right(grade) for grade in grades]
        if None in right:
            return None
        if pick is None:
            return 0.0
        return 0.5 if right[0] == right[1] else float(bool(right[pick]))
