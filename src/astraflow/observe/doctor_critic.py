"""Is the critic of use? Of policies whose loss has one: does it tell states apart, how wrong is it, what does it tell.

The figures are of its judgement of each batch before it learned from it. A critic begins as 0 everywhere: it then
explains nothing, is as wrong as saying 0 is, and learns a little with each step, which is why nothing is said in the
first ``RECENT_STEPS``.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from astraflow.observe.findings import RECENT_STEPS, Finding, State, Symptoms, above, below, recent

LONG_STEPS = 100
"""Steps after which a critic that still explains nothing will not by itself."""
SAME_WATCH, SAME_BROKEN = 1e-2, 1e-4
"""Deviation of the values over that of the returns. 20 steps of AdamW at 1e-5 move a value by some thousandths."""
WRONG_WATCH, WRONG_BROKEN = 2.0, 10.0
"""Mean squared error over that of saying 0. A critic that learns is below 1; returns whose size changes as the policy
learns pass 1 for a while."""
RIGHT = 0.1
"""The same, below which a critic is right enough, whatever it explains: nearly all returns are then alike."""
LITTLE = 1e-3
"""Explained variance, up to which a critic is a constant: values that hardly move share some millionths by chance."""
LARGE = 10.0
"""Deviation of returns for which a critic, whose head begins as 0, needs thousands of AdamW steps at usual rates."""
WORSE = -1.0
"""Explained variance: its errors vary twice as much as what it is to explain."""


def _values(it: Symptoms) -> Finding | None:
    if not has_critic(it):
        return None
    values, returns = recent(it, "critic/value_deviation"), recent(it, "critic/return_deviation")
    state, found = State.UNKNOWN, "no step with a critic that says yet"
    if values is not None and returns is not None:
        found = f"values vary by {values:.2g}, returns by {returns:.2g}"
        if returns > 0 and not _is_new(it):
            state = State.NORMAL if _is_right(it) else below(values / returns, SAME_WATCH, SAME_BROKEN)
    advice = (
        "the critic says the same of every state: raise critic.lr or critic.updates, or begin with critic.pretraining"
    )
    if recent(it, "critic/lr") == 0.0:
        advice = "critic.lr is 0: it never learns"
    elif returns is not None and returns >= LARGE:
        advice = (
            "the returns are too large for a critic that begins as 0: scale the rewards to about 1, or raise critic.lr"
        )
    return Finding(
        name="values",
        state=state,
        found=found,
        normal=f"after {RECENT_STEPS} steps the values vary by more than {SAME_WATCH:.0%} of what the returns do",
        advice=advice,
    )


def _errors(it: Symptoms) -> Finding | None:
    if not has_critic(it):
        return None
    wrong, loss = recent(it, "critic/relative_error"), recent(it, "loss/value")
    found = "every return was 0" if wrong is None else f"squared error {wrong:.2g} of what saying 0 would make"
    return Finding(
        name="errors",
        state=State.UNKNOWN if wrong is None else above(wrong, WRONG_WATCH, WRONG_BROKEN),
        found=found if loss is None else f"{found}, value loss {loss:.3g}",
        normal="1 in the first step, less as it learns; it need not fall to 0: not all of a return can be known",
        advice="the critic runs away: lower critic.lr, clip (clip_norm, value_clip), look for returns beyond reason",
    )


def _explained(it: Symptoms) -> Finding | None:
    if not has_critic(it):
        return None
    series = it.series.get("critic/explained_variance", ())
    now = recent(it, "critic/explained_variance")
    state = State.UNKNOWN
    if now is not None and not _is_new(it):
        for_long = len(series) >= LONG_STEPS and fmean(series[-LONG_STEPS:]) <= LITTLE
        state = State.NORMAL
        if now <= LITTLE and not _is_right(it):
            state = State.BROKEN if now <= WORSE or for_long else State.WATCH
    return Finding(
        name="critic",
        state=state,
        found="the returns of no step varied" if now is None else f"explains {now:.2g} of the returns' variance",
        normal=f"above {LITTLE} after {RECENT_STEPS} steps and rising; 0 is no better than a constant, 1 is all; where "
        "nearly all returns are alike there is little to explain",
        advice="advantages are noisier with it than without: teach it alone first (critic.pretraining), raise "
        "critic.updates, look at critic.lr, or take a loss without a critic",
    )


def has_critic(it: Symptoms) -> bool:
    return "critic/lr" in it.series


def _is_right(it: Symptoms) -> bool:
    wrong = recent(it, "critic/relative_error")
    return wrong is not None and wrong <= RIGHT


def _is_new(it: Symptoms) -> bool:
    return len(it.series["critic/lr"]) < RECENT_STEPS


CRITIC_CHECKS: tuple[Callable[[Symptoms], Finding | None], ...] = (_values, _errors, _explained)
"""Causes before effects."""
