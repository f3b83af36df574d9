"""A solver answers, a verifier judges; what is judged wrong is tried again, up to ``rounds`` times.

solver    each answer: its own grade, whatever the verifier says of it
verifier  each verdict: 1 if it equals the truth of the answer that it judges, else 0, also for none (F101)
episode   the grade of the last answer
"""

from __future__ import annotations

from astraflow.errors import ConfigError
from astraflow.rollout.workflow import Agents, Message, Reward
from astraflow.types import Task
from astraflow.workflows.single_turn import Ask, Grade, prompt_of
from astraflow.workflows.truth import (
    Truth,
    agrees,
    assistant,
    judged_key,
    last_word,
    opening,
    question_of,
    two_words,
    user,
)

CHECK = "{question}\n\nProposed answer:\n{answer}\n\nIs it {yes} or {no}? End with that one word."
AGAIN = "A reviewer found this {no}:\n{critique}\n\nAnswer again."


class SolveAndVerify:
    """Roles ``solver`` and ``verifier``. Compared with each other: answers of one round, verdicts of one round on right
    answers, and those on wrong ones."""

    def __init__(
        self,
        grade: Grade,
        *,
        ask: Ask = prompt_of,
        rounds: int = 1,
        words: tuple[str, str] = ("correct", "wrong"),
        check: str = CHECK,
        again: str = AGAIN,
        passing: float = 1.0,
    ) -> None:
        """``check`` is filled with question, answer, yes, no; ``again`` with critique, yes, no."""
        if rounds < 1:
            raise ConfigError(f"SolveAndVerify.rounds must be at least 1, found {rounds}")
        self._truth = Truth(grade, passing=passing)
        self._ask = ask
        self._rounds = rounds
        self._yes, self._no = two_words(words, what="SolveAndVerify.words")
        self._check = check
        self._again = again

    async def __call__(self, task: Task, agents: Agents) -> Reward:
        history: list[Message] = opening(self._ask, task)
        turns: dict[int, float | None] = {}
        keys: dict[int, str] = {}
        grade: float | None = None
        for number in range(self._rounds):
            answer = await agents["solver"].chat(history)
            verdict = await agents["verifier"].chat([user(self._question(task, answer.text))])
            grade = await self._truth.of(answer.text, task)
            said = self._verdict(verdict.text)
            right = self._truth.is_right(grade)
            turns |= {answer.turn: grade, verdict.turn: agrees(said, right)}
            keys |= {answer.turn: f"solver/{number}", verdict.turn: judged_key(f"verifier/{number}", right)}
            if said:
                break
            critique = self._again.format(critique=verdict.text, yes=self._yes, no=self._no)
            history = [*history, assistant(answer.text), user(critique)]
        return Reward(grade, turns=turns, baseline_keys=keys)

    def _question(self, task: Task, answer: str) -> str:
        question = question_of(self._ask, task)
        return self._check.format(question=question, answer=answer, yes=self._yes, no=self._no)

    def _verdict(self, text: str) -> bool | None:
        word = last_word(text, (self._yes, self._no))
        return None if word is None else word == self._yes
