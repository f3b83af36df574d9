"""One line per component, that says what it waits for, how long, and why."""

from __future__ import annotations

import pytest

from astraflow.observe.status import component_line, policy_line, status_lines, wait_words
from astraflow.observe.terminal import harmless, visible
from astraflow.observe.waits import WaitReason
from astraflow.wire.messages import ComponentReport, ComponentStatus, EvalPoint, PolicyStatus, StatusReply

WHY = "5/8 groups; oldest episode 40 s on b2"


def trainer(**changes: object) -> ComponentStatus:
    report = ComponentReport(doing="batch", since_s=11.0, why=WHY, versions={"solver": 7})
    fields = {"component": "trainer", "name": "solver", "state": "alive", "heard_s": 1.0, "report": report, **changes}
    return ComponentStatus(**fields)  # type: ignore[arg-type]


def test_a_wait_says_for_what_since_when_and_why() -> None:
    assert component_line(trainer()) == f"trainer solver waits 12 s for a batch: {WHY}, solver v7"
    assert wait_words(trainer()) == f"waits for a batch: {WHY}"


@pytest.mark.parametrize("reason", list(WaitReason))
def test_dataflow_s_reasons_are_words(reason: WaitReason) -> None:
    report = ComponentReport(doing="lease", since_s=3.0, why=reason.value)
    line = component_line(trainer(component="rollout", name="b2", report=report, heard_s=0.5))
    assert line.startswith("rollout b2    waits 3.5 s for an episode: ")
    assert reason.value not in line and "_" not in line


def test_work_says_what_it_is() -> None:
    busy = trainer(report=ComponentReport(doing="steps", since_s=2.5, why="batch 4"), heard_s=0.0)
    assert component_line(busy) == "trainer solver steps for 2.5 s: batch 4"
    assert wait_words(busy) == "steps"


def test_a_dead_one_says_when_it_was_heard_of_and_its_first_cause() -> None:
    dead = trainer(state="dead", heard_s=700.0, report=ComponentReport(error="out of memory"))
    assert component_line(dead) == "trainer solver dead, last heard of 12 min ago: out of memory"
    assert wait_words(dead) == "dead"


NASTY = "red \x1b[31m, back \x08\r, bell \x9b, \u202eturned\nrun r: finished"
HARMLESS = "red \\x1b[31m, back \\x08\\r, bell \\x9b, \\u202eturned\n    | run r: finished"


def test_what_user_code_said_does_nothing_to_a_terminal() -> None:
    dead = trainer(state="dead", report=ComponentReport(error=NASTY))
    policy = PolicyStatus(policy="solver", trainable=True, version=0, steps=1, waits=NASTY)
    status = StatusReply(
        run="r", state="failed", error=NASTY, now_s=1.0, policies=(policy,), components=(dead,), episodes={}
    )
    lines = status_lines(status)
    assert lines[0] == f"run r: failed ({HARMLESS})"
    assert sum(HARMLESS in line for line in lines) == 3
    shown = "\n".join(lines)
    assert all(character.isprintable() or character == "\n" for character in shown)
    assert sum(line.startswith("run r") for line in shown.splitlines()) == 1, "none is forged"


@pytest.mark.parametrize("text", ["", "plain", "größer → 日本 🙂", "a\u00a0b", "tab\there"])
def test_what_is_harmless_stays(text: str) -> None:
    assert harmless(text) == text


def test_lines_of_one_message() -> None:
    assert harmless("a\r\nb\n\nc\n") == "a\n    | b\n    | \n    | c"
    assert visible("a\r\nb\x1b\n") == "a\nb\\x1b\n"


def test_a_policy_shows_groups_ages_and_what_is_missing() -> None:
    policy = PolicyStatus(
        policy="solver",
        trainable=True,
        version=7,
        steps=60,
        groups={"kept": 3, "dropped/zero_variance": 2},
        staleness={"10": 1, "2": 5, "0": 9},
        waits="3/8 groups",
    )
    assert policy_line(policy) == (
        "policy solver 7/60 steps; groups dropped/zero_variance 2, kept 3; staleness 0:9 2:5 10:1; 3/8 groups"
    )
    ended = PolicyStatus(policy="main", trainable=True, version=7, steps=7, frozen=True)
    assert policy_line(ended) == "policy main   7/7 steps, frozen"
    frozen = PolicyStatus(policy="judge", trainable=False, version=0, steps=0)
    assert policy_line(frozen).split() == ["policy", "judge", "frozen"]


def test_the_whole_fits_one_screen_and_begins_with_the_state() -> None:
    status = StatusReply(
        run="r-001",
        state="failed",
        error="Starved: ten batches without signal",
        now_s=9.0,
        policies=(),
        components=(trainer(),),
        episodes={"pending": 0, "done": 12},
        evals=tuple(
            EvalPoint(
                policy="solver", version=v, digest="d", dataset="t", score=0.5, coverage=0.99, episodes=200, at_s=1.0
            )
            for v in range(9)
        ),
        counters={"fenced": 2, "closed": 0},
    )
    lines = status_lines(status)
    assert lines[0] == "run r-001: failed (Starved: ten batches without signal)"
    assert "eval          solver v8: 0.500 on 200 episodes of t (99% graded)" in lines
    assert lines[-1] == "counters      fenced 2"
    assert len(lines) < 25
