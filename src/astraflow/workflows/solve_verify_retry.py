"""A solver answers, a verifier criticises, and the critique goes into one retry, unless it says that all is well.

solver    answer and retry: each its own grade
verifier  1 if its verdict equals the truth of the first answer, else 0, also for none (F101)
episode   the grade of the retry if there was one, else of the answer
"""

from __future__ import annotations

from astraflow.rollout.workflow import Agents, Reward
from astraflow.types import Task
from astraflow.workflows.single_turn import Ask, Grade, prompt_of
from astraflow.workflows.solve_and_verify import AGAIN, CHECK
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


class SolveVerifyRetry:
    """Roles ``solver`` and ``verifier``. Retries are compared with retries, verdicts on right answers with such."""

    def __init__(
        self,
        grade: Grade,
        *,
        ask: Ask = prompt_of,
        words: tuple[str, str] = ("correct", "wrong"),
        check: str = CHECK,
        again: str = AGAIN,
        passing: float = 1.0,
    ) -> None:
        """``check`` is filled with question, answer, yes, no; ``again`` with critique, yes, no."""
        self._truth = Truth(grade, passing=passing)
        self._ask = ask
        self._yes, self._no = two_words(words, what="SolveVerifyRetry.words")
        self._check = check
        self._again = again

    async def __call__(self, task: Task, agents: Agents) -> Reward:
        words = {"yes": self._yes, "no": self._no}
        history = opening(self._ask, task)
        answer = await agents["solver"].chat(history)
        check = self._check.format(question=question_of(self._ask, task), answer=answer.text, **words)
        critique = await agents["verifier"].chat([user(check)])
        grade = await self._truth.of(answer.text, task)
        said = last_word(critique.text, (self._yes, self._no))
        verdict = None if said is None else said == self._yes
        right = self._truth.is_right(grade)
        turns = {answer.turn: grade, critique.turn: agrees(verdict, right)}
        keys = {critique.turn: judged_key("verifier", right)}
        if verdict:
            return Reward(grade, turns=turns, baseline_keys=keys)
        again = self._again.format(critique=critique.text, **words)
        retry = await agents["solver"].chat([*history, assistant(answer.text), user(again)])
        grade = await self._truth.of(retry.text, task)
        return Reward(grade, turns={**turns, retry.turn: grade}, baseline_keys={**keys, retry.turn: "solver/retry"})
