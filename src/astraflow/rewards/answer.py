"""Finding the final answer in a reply, and comparing it with the right one exactly. One rule for every workflow:

the last complete \\boxed{…} or <answer>…</answer> after the thinking part counts, everything else is ignored;
no such answer is wrong, prose is searched only where a recipe asks for it, and then only its last line (F5, F6)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from astraflow.types import Task

NO_FINAL_ANSWER = "no_final_answer"
_MARKS = re.compile(r"\\(?:boxed|fbox)\s*\{|[{}]|</?answer>")
_NUMBER = re.compile(r"(?<![\w.])[-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?![\w])%?")
_WHOLE = re.compile(r"([-+]?)\$?(\d{1,3}(?:,\d{3})+|\d+|)(\.\d+)?(?:[eE]([-+]?\d{1,3}))?(\s*\\?%)?")
_FRACTION = re.compile(r"([-+]?)\s*(?:\\[dt]?frac\s*\{?(\d+)\}?\s*\{?(\d+)\}?|(\d+)\s*/\s*(\d+))")
_LONGEST_NUMBER = 400
"""Characters: longer digits are text, so that no reply can make us compute for minutes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """1.0 or 0.0, and why not 1.0: ``no_final_answer`` or ``different``."""

    score: float
    reason: str = ""


class Answer:
    """Grades a reply against ``payload[key]``; a function of ``SingleTurn``."""

    def __init__(self, *, key: str = "answer", prose: bool = False) -> None:
        self._key = key
        self._prose = prose

    def __call__(self, text: str, task: Task) -> float:
        return judge(text, str(task.payload[self._key]), prose=self._prose).score


def judge(text: str, gold: str, *, prose: bool = False) -> Judgement:
    """``prose``: where no answer is marked, the last number of the last line counts. Linear in the text's length."""
    answer = final_answer(text)
    if answer is None and prose:
        answer = last_number(text)
    if answer is None:
        return Judgement(score=0.0, reason=NO_FINAL_ANSWER)
    return Judgement(score=1.0) if equal(answer, gold) else Judgement(score=0.0, reason="different")


def has_answer(text: str) -> bool:
    """Whether a final answer is marked: the ``form`` of ``SingleTurn``."""
    return final_answer(text) is not None


def final_answer(text: str) -> str | None:
    """What stands in the last complete box or answer tag behind the thinking part; None if there is none."""
    said = after_thinking(text)
    if said is None:
        return None
    opened: list[tuple[bool, int]] = []  # braces still open: of a box?, where its inside begins
    tag: int | None = None
    best = (-1, "")
    for found in _MARKS.finditer(said):
        mark = found.group()
        if mark == "<answer>":
            tag = found.end()
        elif mark == "</answer>":
            if tag is not None:
                best = max(best, (tag, said[tag : found.start()]))
            tag = None
        elif mark == "}":
            is_box, start = opened.pop() if opened else (False, 0)
            if is_box and start > best[0]:
                best = (start, said[start : found.start()])
        else:
            opened.append((mark != "{", found.end()))
    return None if best[0] < 0 else best[1].strip()


def after_thinking(text: str) -> str | None:
    """What follows the last ``</think>``; the whole text without one; None while thinking was never ended."""
    if "</think>" in text:
        return text.rpartition("</think>")[2]
    return None if "<think>" in text else text


def is_well_formed(text: str) -> bool:
    """Exactly one closed, non-empty ``<think>``, then exactly one ``<answer>``, nothing but white space around (F8)."""
    tags = [(found.group(), found.start(), found.end()) for found in re.finditer(r"</?(?:think|answer)>", text)]
    if [tag for tag, _, _ in tags] != ["<think>", "</think>", "<answer>", "</answer>"]:
        return False
    think, unthink, answer, unanswer = tags
    around = (text[: think[1]], text[unthink[2] : answer[1]], text[unanswer[2] :])
    inside = (text[think[2] : unthink[1]], text[answer[2] : unanswer[1]])
    return not any(part.strip() for part in around) and all(part.strip() for part in inside)


def last_number(text: str) -> str | None:
    """The last number of the last line that is not empty (F7): digits, with sign, groups, decimals and per cent."""
    said = (after_thinking(text) or "").rstrip()
    line = said[said.rfind("\n") + 1 :][-2000:]
    found = [each.group() for each in _NUMBER.finditer(line) if any(c.isdigit() for c in each.group())]
    return found[-1].replace("−", "-") if found else None


def equal(answer: str, gold: str) -> bool:
    """Numbers by their exact value (F1), anything else by its text without case and spacing.

    ``x%`` equals x/100, and the bare number x is right for the gold ``x%``; ``x%`` is wrong for the gold x.
    """
    value, right = number(answer), number(gold)
    if value is None or right is None:
        return _plain(answer).casefold() == _plain(gold).casefold()
    if value == right:
        return True
    is_bare = "%" not in answer
    return is_bare and "%" in gold and value == right * 100


def number(text: str) -> Fraction | None:
    """The exact value of a text that is one number: ``-8``, ``1,234.50``, ``$12``, ``3/4``, ``1e-3``, ``25%``."""
    bare = _plain(text)
    if len(bare) > _LONGEST_NUMBER:
        return None
    fraction = _FRACTION.fullmatch(bare)
    if fraction is not None:
        sign, top, bottom, above, below = fraction.groups()
        under = int(bottom or below)
        return None if under == 0 else (-1 if sign == "-" else 1) * Fraction(int(top or above), under)
    whole = _WHOLE.fullmatch(bare)
    if whole is None or not (whole[2] or whole[3]):
        return None
    sign, digits, decimals, exponent, percent = whole.groups()
    value = Fraction(digits.replace(",", "") + (decimals or "") if digits else "0" + decimals)
    value *= Fraction(10) ** int(exponent or 0)
    return (-1 if sign == "-" else 1) * (value / 100 if percent else value)


def _plain(text: str) -> str:
    """Without what only dresses an answer: dollar signs around it, bold, thin spaces, a final full stop."""
    bare = text.strip().strip("*").strip()
    bare = re.sub(r"\\(?:text|mathrm|mathbf)\s*\{([^{}]*)\}", r"\1", bare)
    bare = bare.replace("{,}", ",").replace("\\,", "").replace("\\!", "").replace("−", "-")
    if len(bare) > 1 and bare.startswith("$") and bare.endswith("$"):
        bare = bare[1:-1]
    bare = re.sub(r"^\\[(\[](.*)\\[)\]]$", r"\1", bare, flags=re.DOTALL)
    return re.sub(r"\s+", " ", bare).strip().rstrip(".").strip()
