"""What workflows of several agents share: an answer's truth, and a word that an agent ends with.

An agent that judges is paid for the truth of its verdict, never for agreeing with another agent (F101).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from astraflow.errors import ConfigError
from astraflow.rewards.limit import TimeLimit
from astraflow.rollout.workflow import Message
from astraflow.types import Task
from astraflow.workflows.single_turn import Ask, Grade


class Truth:
    """``grade`` in a thread (or awaited) for at most ``limit_s``; an answer is right from ``passing`` on."""

    def __init__(self, grade: Grade, *, passing: float = 1.0, limit_s: float = 10.0) -> None:
        self._grade = grade
        self._passing = passing
        self._limit = TimeLimit(limit_s)

    async def of(self, text: str, task: Task) -> float | None:
        """The grade; None: it could not be told. Raises GraderFailed."""
        return await self._limit.run(self._grade, text, task)

    def is_right(self, grade: float | None) -> bool | None:
        """None stays None: what nobody can tell is nobody's mistake."""
        return None if grade is None else grade >= self._passing


def agrees(verdict: bool | None, right: bool | None) -> float | None:
    """1 if the verdict equals the truth, else 0, also for no verdict; None where there is no truth to equal."""
    return None if right is None else float(verdict is right)


def judged_key(role: str, right: bool | None) -> str:
    """``baseline_key`` of a verdict: on right answers it is compared with others on right ones, on wrong with wrong.

    What was judged is not the judge's doing, so that this biases nothing; and one that always says the same, whatever
    answers are like on average, learns nothing from it.
    """
    return role if right is None else f"{role}/{'right' if right else 'wrong'}"


def last_word(text: str, words: Sequence[str]) -> str | None:
    """The one of ``words`` that stands last in the text, as a word of its own and in any case; None: none does."""
    found = None
    by_length = sorted(words, key=len, reverse=True)
    for match in re.finditer(rf"(?<!\w)(?:{'|'.join(map(re.escape, by_length))})(?!\w)", text, re.IGNORECASE):
        found = match.group().lower()
    return next((word for word in words if word.lower() == found), None)


def two_words(words: tuple[str, str], *, what: str) -> tuple[str, str]:
    """Raises ConfigError unless they can be told apart."""
    if len(words) != 2 or not all(words) or words[0].lower() == words[1].lower():
        raise ConfigError(f"{what} must be two different words, found {words!r}")
    return words


def question_of(ask: Ask, task: Task) -> str:
    """The task's question as one text, also where it is asked as a history."""
    asked = ask(task)
    return asked if isinstance(asked, str) else "\n".join(str(message["content"]) for message in asked)


def opening(ask: Ask, task: Task) -> list[Message]:
    asked = ask(task)
    return [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
