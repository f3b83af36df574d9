"""The engine takes the threads that are fastest now."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from astraflow.engines.threads import ThreadTuner

Cost = Callable[[int, int], float]
"""Seconds of a step from its threads and rows."""


def idle(threads: int, rows: int) -> float:
    return (rows + 30) * 1e-3 / threads


def shared(threads: int, rows: int) -> float:
    """Another process has the second core: two threads wait for each other."""
    return (rows + 30) * 1e-3 * (1 if threads == 1 else 2.5)


def play(tuner: ThreadTuner, cost: Cost, steps: int, rows: int = 64) -> list[int]:
    taken = []
    for _ in range(steps):
        taken.append(tuner.threads)
        tuner.took(cost(tuner.threads, rows), rows)
    return taken


def test_one_choice_is_never_left() -> None:
    assert set(play(ThreadTuner([2]), shared, 500)) == {2}
    assert set(play(ThreadTuner([2, 2]), shared, 500)) == {2}


def test_begins_with_the_first_choice_and_takes_the_second_core_where_it_is_free() -> None:
    tuner = ThreadTuner([1, 2])
    taken = play(tuner, idle, 400)
    assert taken[:8] == [1] * 8
    assert taken[15:].count(2) > 0.9 * len(taken[15:])


def test_leaves_the_second_core_to_whoever_needs_it() -> None:
    tuner = ThreadTuner([1, 2])
    play(tuner, idle, 300)
    assert tuner.threads == 2
    taken = play(tuner, shared, 400)
    assert taken[:120].count(1) > 0
    assert taken[120:].count(1) > 0.9 * len(taken[120:])
    back = play(tuner, idle, 400)
    assert back[120:].count(2) > 0.9 * len(back[120:])


def test_a_difference_within_the_noise_changes_nothing_and_trials_become_rare() -> None:
    tuner = ThreadTuner([1, 2])
    taken = play(tuner, lambda threads, rows: (rows + 30) * (1.0 if threads == 1 else 0.95), 2000)
    assert taken[-1] == 1
    assert taken.count(2) <= 3 * (2000 // 96 + 5)


def test_steps_of_different_sizes_are_compared_by_what_they_cost() -> None:
    """A trial that falls on small steps is not taken for a faster one."""
    tuner = ThreadTuner([1, 2])
    taken = []
    for _ in range(600):
        taken.append(tuner.threads)
        rows = 64 if tuner.threads == 1 else 2
        tuner.took(shared(tuner.threads, rows), rows)
    assert taken.count(2) < 60


@given(st.lists(st.tuples(st.floats(1e-6, 10), st.integers(1, 4096)), max_size=300))
def test_whatever_is_measured_the_choice_is_one_of_the_choices(steps: list[tuple[float, int]]) -> None:
    tuner = ThreadTuner([1, 2, 4])
    for seconds, rows in steps:
        assert tuner.threads in (1, 2, 4)
        tuner.took(seconds, rows)
