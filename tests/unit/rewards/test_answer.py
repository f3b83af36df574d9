"""One rule for the final answer, and exact comparison."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.rewards.answer import (
    NO_FINAL_ANSWER,
    Answer,
    equal,
    final_answer,
    is_well_formed,
    judge,
    last_number,
    number,
)
from astraflow.rewards.exact import Exact
from astraflow.testing.check_reward import check_reward
from astraflow.types import Task

TASK = Task(key="t", payload={"answer": "5"})


@pytest.mark.parametrize(
    ("text", "gold", "score"),
    [
        (r"First \boxed{7}. No: the answer is \boxed{5}.", "5", 1.0),
        (r"\boxed{5} I first thought \boxed{7}", "5", 0.0),
        (r"\boxed{1} or \boxed{2}", "1", 0.0),
        (r"\boxed{840}. **Final Answer** \boxed{840}", "840", 1.0),
        (r"\boxed{1,2,3,4,5}", "5", 0.0),
        (r"\boxed{5} and then \boxed{7", "5", 1.0),
        ("<answer>7</answer> no: <answer>5</answer>", "5", 1.0),
        (r"<answer>5</answer> or \boxed{7}", "5", 0.0),
        (r"\boxed{7} <answer>5</answer>", "5", 1.0),
        (r"<think>\boxed{5}</think> \boxed{7}", "5", 0.0),
        (r"<think>\boxed{5}</think> it is 5", "5", 0.0),
        (r"<think>never ended \boxed{5}", "5", 0.0),
    ],
)
def test_f5_the_last_complete_answer_counts(text: str, gold: str, score: float) -> None:
    assert judge(text, gold).score == score


def test_f6_no_box_is_wrong_and_fast() -> None:
    began = time.perf_counter()
    for text, gold in (("a 1 " * 500_000, "1"), ("I tried 41, 42, 43 and gave up.", "42"), (r"\boxed{" * 300_000, "1")):
        found = judge(text, gold)
        assert (found.score, found.reason) == (0.0, NO_FINAL_ANSWER)
    assert time.perf_counter() - began < 1.0


def test_f6_prose_is_an_option_and_looks_at_the_last_line_only() -> None:
    assert judge("it is 42\nor not", "42", prose=True).score == 0.0
    assert judge("let me see\nit is 42", "42", prose=True).score == 1.0
    assert judge("it is 42\n\n", "42", prose=True).score == 1.0


@pytest.mark.parametrize(
    ("text", "gold", "score"),
    [
        ("72 clips, altogether.", "72", 1.0),
        ("The change is -8.", "-8", 1.0),
        ("The change is -8.", "8", 0.0),
        ("It costs $1,234.50.", "1234.5", 1.0),
        ("#### 18", "18", 1.0),
        ("so 3.", "3", 1.0),
        ("5-3", "3", 1.0),
        ("x = .5", "1/2", 1.0),
        (",. and so on", "0", 0.0),
    ],
)
def test_f7_the_last_number_has_digits_sign_and_decimals(text: str, gold: str, score: float) -> None:
    assert judge(text, gold, prose=True).score == score


def test_f7_punctuation_is_no_number() -> None:
    assert last_number("well, ... -") is None
    assert last_number("3,14") == "14" and last_number("1,234") == "1,234"


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("<think>a\nb</think><answer>5</answer>", True),
        ("<think></think>a", False),
        ("<think>a</think><answer>5</answer><answer>6</answer>", False),
        ("<think>a<answer>5</answer>", False),
        ("</think><answer>5</answer><think>", False),
        ("<think>a\nb</think><answer>5</answer>\n", True),
        ("<think>a</think> so <answer>5</answer>", False),
        ("<think>a</think><answer> </answer>", False),
    ],
)
def test_f8_one_thought_then_one_answer(text: str, is_right: bool) -> None:
    assert is_well_formed(text) is is_right


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}", False),
        ("0.3333333", "1/3", False),
        (r"\frac12", "1/2", True),
        (r"\dfrac{9}{7}", r"\dfrac{9}{7}", True),
        ("004", "4", True),
        (r"\text{13}", "13", True),
        ("**73**", "73", True),
        ("1{,}234", "1234", True),
        (r"1\,234", "1234", True),
        ("1e1", "10", True),
        ("-3", "3", False),
        ("−3", "-3", True),
        ("25%", "1/4", True),
        ("25", "25%", True),
        ("25%", "25", False),
        ("0.25", "25%", True),
        ("1/0", "1/0", True),
        ("1/0", "0", False),
        ("Paris", "paris", True),
        ("", "0", False),
        ("[0,1]", "(0,1)", False),
    ],
)
def test_f10_equal_means_equal(answer: str, gold: str, same: bool) -> None:
    assert equal(answer, gold) is same


@given(st.integers(-(10**30), 10**30), st.integers(-(10**30), 10**30))
def test_numbers_are_equal_exactly_when_they_are(one: int, other: int) -> None:
    assert equal(f"{one:,}", str(other)) is (one == other)


@given(st.text(max_size=200))
def test_any_text_is_judged(text: str) -> None:
    assert judge(text, "5", prose=True).score in (0.0, 1.0)
    assert final_answer(text) is None or isinstance(final_answer(text), str)


def test_huge_digits_are_text() -> None:
    assert number("9" * 10_000) is None


def test_rewards_keep_the_promises_of_a_reward() -> None:
    check_reward(Answer(), TASK, right=[r"\boxed{5}", "<answer>5.0</answer>"], wrong=["5", r"\boxed{6}"])
    check_reward(Answer(prose=True), TASK, right=["5", "it is 5."], wrong=["6"])
    check_reward(Exact(), TASK, right=["5", " 5\n"], wrong=["5.", r"\boxed{5}"])
