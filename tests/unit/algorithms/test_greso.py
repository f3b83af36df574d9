"""GRESO: streaks, kinds relative to the range, probabilities with floors, targets, and what comes back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.algorithms.curate import Greso
from astraflow.algorithms.curate.rewards import Kind, Rewards, has_signal
from astraflow.errors import ConfigError
from astraflow.tasks.generated import GeneratedTasks
from astraflow.types import Task
from tests.unit.algorithms.curate_build import admitted, group, source

TASKS = source(8)


def greso(tasks=TASKS, **more) -> Greso:
    return Greso(tasks, **{"group_size": 4, "reward_range": (0.0, 1.0), **more})


def play(curate: Greso, place: int, rewards, *, times: int = 1, version: int = 0, **more) -> None:
    for _ in range(times):
        curate.observe(group(TASKS.task(place), rewards, version=version, **more))


# ── kinds and streaks ──


@pytest.mark.parametrize(
    ("rewards", "ends", "kind"),
    [
        ([-1.0] * 4, (-1.0, 1.0), Kind.HARD),
        ([1.0] * 4, (-1.0, 1.0), Kind.EASY),
        ([0.4] * 4, (0.0, 0.4), Kind.EASY),
        ([0.5] * 4, (0.0, 1.0), Kind.OTHER),
        ([0.0] * 4, (0.0, 0.4), Kind.HARD),
        ([2.0] * 4, (0.0, 1.0), Kind.EASY),
        ([1e30] * 4, (0.0, 1e30), Kind.EASY),
        ([-1e308] * 4, (-1e308, 1e308), Kind.HARD),
    ],
)
def test_f66_the_kind_is_told_by_the_declared_ends_and_not_by_a_half(rewards, ends, kind):
    seen = Rewards("Greso", ends, "")
    found = seen.look(group(TASKS.task(0), rewards))
    assert found is not None and seen.kind(found) is kind


def test_f66_without_a_declared_range_the_ends_are_those_seen_so_far():
    seen = Rewards("Greso", None, "")
    first = seen.look(group(TASKS.task(0), [0.4] * 4))
    assert first is not None and seen.kind(first) is Kind.OTHER, "nothing tells good from bad yet"
    second = seen.look(group(TASKS.task(1), [0.0] * 4))
    assert second is not None and seen.kind(second) is Kind.HARD
    again = seen.look(group(TASKS.task(0), [0.4] * 4))
    assert again is not None and seen.kind(again) is Kind.EASY
    assert seen.success(again) == 1.0 and seen.success(second) == 0.0


def test_f66_three_rounds_without_variance_at_a_half_are_an_eighth_but_not_below_the_floor():
    curate = greso()
    play(curate, 0, [1.0] * 4, times=3)
    play(curate, 1, [0.0] * 4, times=3)
    play(curate, 2, [0.5] * 4, times=3)
    assert curate.probability(0) == 0.125
    assert curate.probability(1) == 0.4
    assert curate.probability(2) == 0.4, "not solved: as hard"
    assert curate.probability(3) == 1.0, "never played"
    play(curate, 0, [1.0] * 4)
    assert curate.probability(0) == 0.1


def test_f66_the_streak_counts_on_whatever_the_kind_and_ends_with_a_signal():
    curate = greso(floor_hard=0.0, floor_easy=0.0)
    play(curate, 0, [1.0] * 4)
    play(curate, 0, [0.0] * 4)
    play(curate, 0, [1.0] * 4)
    assert curate.probability(0) == 0.125
    play(curate, 0, [0.0, 1.0])
    assert curate.probability(0) == 1.0


def test_a_deviation_that_rounds_to_zero_is_still_a_signal():
    """F34: rewards are compared exactly."""
    curate = greso()
    play(curate, 0, [1.0, 1.0 - 2**-53])
    assert curate.probability(0) == 1.0


def test_only_rewards_that_are_compared_with_each_other_make_a_signal():
    assert not has_signal(group(TASKS.task(0), [0.0, 0.0, 1.0, 1.0], keys="aabb"))
    assert has_signal(group(TASKS.task(0), [0.0, 1.0, 1.0, 1.0], keys="aabb"))
    assert not has_signal(group(TASKS.task(0), [0.0, None]))


def test_groups_in_which_nothing_counts_or_of_others_say_nothing():
    curate = greso()
    before = curate.state_dict()
    play(curate, 0, [None] * 4)
    curate.observe(group(Task(key="rows0", dataset="elsewhere"), [1.0] * 4))
    curate.observe(group(Task(key="unknown", dataset="rows"), [1.0] * 4))
    after = curate.state_dict()
    assert after["learned"]["window"] == before["learned"]["window"]
    assert not len(after["learned"]["streak"]["at"])


def test_the_rewards_of_one_policy_are_looked_at():
    curate = greso()
    play(curate, 0, [1.0] * 4, policy="a")
    play(curate, 0, [0.0, 1.0], policy="b")
    assert curate.probability(0) == 0.5, "b is another policy: of the first that was observed"
    named = greso(policy="b")
    play(named, 0, [1.0] * 4, policy="a")
    assert named.probability(0) == 1.0
    play(named, 0, [1.0] * 4, policy="b")
    assert named.probability(0) == 0.5


# ── targets ──


def window(curate: Greso, *, easy: int = 0, hard: int = 0, other: int = 0, signal: int = 0, version: int) -> None:
    for count, rewards in ((easy, [1.0] * 2), (hard, [0.0] * 2), (other, [0.5] * 2), (signal, [0.0, 1.0])):
        play(curate, 0, rewards, times=count, version=version)


def test_p_moves_by_a_hundredth_after_each_version_against_its_target():
    curate = greso()
    window(curate, easy=1, hard=1, signal=10, version=0)  # 1/12 = 0.0833 >= 0.083, 0.0833 < 0.167
    assert (curate.p_easy, curate.p_hard) == (0.5, 0.5), "the version is not over"
    window(curate, hard=2, signal=10, version=1)
    assert (curate.p_easy, curate.p_hard) == (0.49, 0.51)
    window(curate, signal=1, version=2)  # hard 2/12 = 0.1667 < 0.167
    assert (curate.p_easy, curate.p_hard) == (0.5, 0.52)
    window(curate, hard=4, version=2)
    window(curate, signal=1, version=3)  # hard 4/5
    assert (curate.p_easy, curate.p_hard) == (0.51, 0.51)


def test_a_share_of_exactly_the_target_moves_p_down():
    curate = greso(target_easy=0.25, target_hard=0.25)
    window(curate, easy=1, hard=1, signal=2, version=0)
    window(curate, signal=1, version=1)
    assert (curate.p_easy, curate.p_hard) == (0.49, 0.49)


def test_groups_between_the_ends_count_in_neither_share_but_in_the_whole():
    curate = greso()
    window(curate, other=20, version=0)
    window(curate, signal=1, version=1)
    assert (curate.p_easy, curate.p_hard) == (0.51, 0.51)
    assert curate.signal_share == 0.0


def test_p_stays_between_its_floor_and_one():
    curate = greso()
    for version in range(120):
        window(curate, easy=1, hard=1, version=version)
    assert (curate.p_easy, curate.p_hard) == (0.1, 0.4)
    for version in range(120, 260):
        window(curate, signal=1, version=version)
    assert (curate.p_easy, curate.p_hard) == (1.0, 1.0)
    assert curate.signal_share == 1.0


def test_a_resume_further_back_closes_the_window_too():
    curate = greso()
    window(curate, easy=1, version=5)
    window(curate, easy=1, version=3)
    assert curate.p_easy == 0.49


# ── choices ──


def test_deferred_tasks_come_back_and_every_call_gives_one():
    curate = greso()
    for place in range(4):
        play(curate, place, [1.0] * 4, times=9)
    found = admitted(curate, 400)
    assert len(found) == 400, "a batch is never short"
    counts = {key: found.count(key) for key in {task.key for task in map(TASKS.task, range(8))}}
    assert all(counts[f"rows{place}"] > 0 for place in range(4)), "what was deferred comes back"
    often = min(counts[f"rows{place}"] for place in range(4, 8))
    seldom = sum(counts[f"rows{place}"] for place in range(4))
    # 0.1 of four tasks' turns: a standard deviation of 0.03 x 4 turns each.
    assert 0.04 < seldom / (4 * often) < 0.17


def test_the_share_that_is_submitted_is_the_probability():
    curate = greso(p_easy=0.7)
    play(curate, 3, [1.0] * 4)
    found = admitted(curate, 8 * 500)
    turns = found.count("rows0")
    assert abs(found.count("rows3") / turns - 0.7) < 4 * (0.7 * 0.3 / turns) ** 0.5


def test_with_no_floor_and_nothing_but_solved_tasks_one_is_submitted_all_the_same():
    curate = greso(floor_easy=0.0, p_easy=0.0)
    for place in range(8):
        play(curate, place, [1.0] * 4)
    assert len(admitted(curate, 3)) == 3


def test_supervised_rows_are_played_once():
    admission = greso(source(3, workflow="supervised")).next()
    assert admission.episodes == 1


REWARDS = st.sampled_from([(0.0, 0.0), (1.0, 1.0), (0.5, 0.5), (0.0, 1.0), (None, None), (1e30, 1e30), (-1e30, 0.0)])
STEP = st.one_of(st.none(), st.tuples(st.integers(0, 7), REWARDS, st.integers(0, 2)))


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(STEP, max_size=40), stop=st.integers(0, 40), declared=st.booleans(), seed=st.integers(0, 3))
def test_f66_f70_the_same_decisions_after_save_and_load(steps, stop, declared, seed):
    ends = (0.0, 1.0) if declared else None

    def run(curate: Greso, part) -> list[str]:
        found = []
        for step in part:
            if step is None:
                found.append(curate.next().task.key)
            else:
                place, rewards, version = step
                play(curate, place, list(rewards), version=version)
        return found

    uninterrupted = greso(reward_range=ends, seed=seed)
    whole = run(uninterrupted, steps)
    first = greso(reward_range=ends, seed=seed)
    head = run(first, steps[:stop])
    second = greso(reward_range=ends, seed=seed)
    second.load_state_dict(first.state_dict())
    assert head + run(second, steps[stop:]) == whole
    known = [(each.p_easy, each.p_hard, each.signal_share) for each in (uninterrupted, second)]
    assert known[0] == known[1]
    assert 0.1 <= second.p_easy <= 1 and 0.4 <= second.p_hard <= 1
    assert all(0.1 <= second.probability(place) <= 1 for place in range(8))


def test_seeds_differ():
    def found(seed: int) -> list[str]:
        return admitted(greso(seed=seed), 30)

    assert len({tuple(found(seed)) for seed in range(4)}) == 4
    assert found(1) == found(1)


# ── bad input ──


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 0}, "Greso.group_size must be at least 1, found 0"),
        ({"seed": -1}, "Greso.seed must be at least 0, found -1"),
        ({"p_easy": 1.5}, r"Greso.p_easy must be in \[0, 1\], found 1.5"),
        ({"p_hard": 0.3}, "Greso.p_hard must be at least floor_hard 0.4, found 0.3"),
        ({"step": float("nan")}, r"Greso.step must be in \[0, 1\], found nan"),
        ({"target_easy": -0.1}, r"Greso.target_easy must be in \[0, 1\]"),
        ({"reward_range": (1.0, 1.0)}, r"Greso.reward_range must be \(low, high\)"),
        ({"reward_range": (0.0, float("inf"))}, "both finite"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        greso(**options)


def test_an_unbounded_source_is_refused_and_so_is_another_one_at_a_resume():
    unbounded = GeneratedTasks("numbers", lambda index: Task(key=str(index)))
    with pytest.raises(ConfigError, match="needs a task source of a known size, 'numbers' is unbounded"):
        greso(unbounded)
    state = greso().state_dict()
    with pytest.raises(ConfigError, match="its tasks changed"):
        greso(source(9)).load_state_dict(state)
    with pytest.raises(ConfigError, match="its seed changed from 0 to 1"):
        greso(seed=1).load_state_dict(state)


def test_what_was_learnt_of_other_tasks_is_forgotten():
    curate = greso()
    play(curate, 0, [1.0] * 4, times=3)
    other = source(5)
    moved = {**curate.state_dict(), "learned": {}, "tasks": other.digest(), "position": 0}
    fresh = greso(other)
    fresh.load_state_dict(moved)
    assert [fresh.probability(place) for place in range(5)] == [1.0] * 5


def test_every_task_comes_once_an_epoch_while_all_have_a_signal():
    curate = greso()
    found = admitted(curate, 24)
    epochs = [sorted(found[at : at + 8]) for at in (0, 8, 16)]
    assert all(epoch == sorted(TASKS.task(i).key for i in range(8)) for epoch in epochs)
    assert len(set(itertools.islice(found, 8))) == 8
