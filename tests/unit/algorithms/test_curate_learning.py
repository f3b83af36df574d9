"""Dots, Prioritised, FilterSolved: what is drawn how often, what unseen tasks are taken for, and exact resumes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.algorithms.curate import Dots, FilterSolved, Mixture, Prioritised, Shuffled, Uniform
from astraflow.algorithms.curate.pool import draw
from astraflow.errors import ConfigError
from astraflow.tasks.generated import GeneratedTasks
from astraflow.tasks.lists import ListTasks
from astraflow.types import Task
from tests.unit.algorithms.curate_build import admitted, group, source

RANGE = (0.0, 1.0)


def play(curate, tasks, place: int, *rewards: float | None) -> None:
    curate.observe(group(tasks.task(place), rewards))


def shares(curate, count: int) -> dict[str, float]:
    found = admitted(curate, count)
    return {key: found.count(key) / count for key in sorted(set(found))}


# ── drawing ──


@settings(deadline=None)
@given(st.lists(st.floats(0, 10), min_size=1, max_size=20), st.floats(0, 1, exclude_max=True))
def test_a_draw_never_takes_what_has_no_weight(weights, point):
    chosen = draw(np.array(weights), point)
    assert 0 <= chosen < len(weights)
    assert weights[chosen] > 0 or not sum(weights) > 0


def test_draws_are_in_proportion():
    points = (np.arange(1000) + 0.5) / 1000
    counts = np.bincount([draw(np.array([1.0, 0.0, 3.0]), point) for point in points], minlength=3)
    assert counts.tolist() == [250, 0, 750]


def test_uniform_draws_all_alike_and_may_repeat():
    found = admitted(Uniform(source(4), group_size=1, seed=1), 4000)
    assert all(abs(found.count(f"rows{i}") / 4000 - 0.25) < 4 * (0.25 * 0.75 / 4000) ** 0.5 for i in range(4))
    assert any(a == b for a, b in itertools.pairwise(found))


# ── Prioritised ──

TASKS = source(4)


def prioritised(**more) -> Prioritised:
    return Prioritised(TASKS, **{"group_size": 4, "reward_range": RANGE, **more})


def test_prioritised_draws_in_proportion_to_what_is_not_solved():
    curate = prioritised()
    for place, reward in enumerate((1.0, 0.75, 0.5, 0.0)):
        play(curate, TASKS, place, reward, reward)
    assert curate.weights().tolist() == [0.0, 0.25, 0.5, 1.0]
    found = shares(curate, 4000)
    assert "rows0" not in found
    for key, wanted in (("rows1", 0.25), ("rows2", 0.5), ("rows3", 1.0)):
        p = wanted / 1.75
        assert abs(found[key] - p) < 4 * (p * (1 - p) / 4000) ** 0.5


def test_prioritised_remembers_in_part_and_counts_the_unseen_as_said():
    curate = prioritised(memory=0.75, unseen=0.5)
    assert curate.weights().tolist() == [0.5] * 4
    play(curate, TASKS, 0, 1.0)
    play(curate, TASKS, 0, 0.0)
    assert curate.weights()[0] == 1 - 0.75
    assert prioritised(least=0.1, unseen=1.0).weights().tolist() == [0.1] * 4


def test_with_everything_solved_all_are_drawn_alike():
    curate = prioritised()
    for place in range(4):
        play(curate, TASKS, place, 1.0)
    assert len(shares(curate, 200)) == 4


def test_a_task_rests_while_others_come():
    found = admitted(prioritised(rest=2), 60)
    assert all(len(set(found[at : at + 3])) == 3 for at in range(58))
    assert len(admitted(prioritised(rest=99), 12)) == 12, "at most all but one rest"
    alone = Prioritised(source(1), group_size=1, rest=5)
    assert admitted(alone, 3) == ["rows0"] * 3
    solved = prioritised(rest=1)
    for place in range(1, 4):
        play(solved, TASKS, place, 1.0)
    found = admitted(solved, 20)
    assert found.count("rows0") == 10, "where only the resting one has weight, another comes"


def test_success_is_on_the_scale_of_the_range():
    curate = prioritised(reward_range=(-1.0, 1.0))
    play(curate, TASKS, 0, -1.0, 1.0)
    play(curate, TASKS, 1, 9.0)
    assert curate.weights()[:2].tolist() == [0.5, 0.0]
    huge = prioritised(reward_range=(-1e308, 1e308))
    play(huge, TASKS, 0, 0.0, 1e308)
    assert huge.weights()[0] == pytest.approx(0.25)


def test_without_a_range_nothing_is_learnt_until_rewards_differ():
    curate = prioritised(reward_range=None)
    play(curate, TASKS, 0, 3.0, 3.0)
    assert curate.weights().tolist() == [1.0] * 4
    play(curate, TASKS, 1, 1.0, 5.0)
    play(curate, TASKS, 0, 5.0, 5.0)
    assert curate.weights()[:2].tolist() == [0.0, 0.5]


# ── Dots ──


def dots(tasks=TASKS, **more) -> Dots:
    return Dots(tasks, **{"group_size": 4, "reward_range": RANGE, **more})


def test_dots_prefers_tasks_solved_half_of_the_time_by_its_formula():
    curate = dots(tau=0.2)
    for place, rewards in enumerate(([1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0, 1.0, 0.0])):
        play(curate, TASKS, place, *rewards)
    assert curate.difficulty().tolist() == [0.0, 0.5, 1.0, 0.25]
    wanted = np.exp(-np.abs(np.array([0.0, 0.5, 1.0, 0.25]) - 0.5) / 0.2)
    assert np.allclose(curate.weights() / curate.weights().sum(), wanted / wanted.sum())
    found = shares(curate, 4000)
    for place, p in enumerate(wanted / wanted.sum()):
        assert abs(found[f"rows{place}"] - p) < 4 * (p * (1 - p) / 4000) ** 0.5


def test_dots_measures_anew():
    curate = dots()
    play(curate, TASKS, 0, 0.0, 0.0)
    play(curate, TASKS, 0, 1.0, 0.0)
    assert curate.difficulty()[0] == 0.5, "the policy has changed: the last measurement counts"


def test_a_tiny_tau_does_not_lose_every_weight():
    curate = dots(tau=1e-9)
    for place in range(4):
        play(curate, TASKS, place, 1.0)
    assert curate.weights().tolist() == [1.0] * 4


def clustered() -> ListTasks:
    """Two directions, three tasks each, and one that points nowhere."""
    rows = [(1, 0), (2, 0.1), (0.5, 0), (0, 1), (0.1, 3), (0, 0.2), (0, 0)]
    return ListTasks("c", [Task(key=str(i), features={"x": np.array(row, np.float32)}) for i, row in enumerate(rows)])


def test_the_difficulty_of_unseen_tasks_is_told_from_similar_ones():
    tasks = clustered()
    curate = dots(tasks, feature="x", refresh=2, sharpness=0.1)
    assert curate.difficulty().tolist() == [0.5] * 7, "before anything is known all are alike"
    play(curate, tasks, 0, 1.0, 1.0)
    play(curate, tasks, 3, 0.0, 0.0)
    found = curate.difficulty()
    assert found[0] == 0.0 and found[3] == 1.0
    assert found[1] < 0.001 and found[2] < 0.001 and found[4] > 0.999 and found[5] > 0.999
    assert found[6] == pytest.approx(0.5), "what points nowhere is like all of them"
    a = np.exp(np.array([2 / np.hypot(2, 0.1), 0.1 / np.hypot(2, 0.1)]) / 0.1)
    assert found[1] == pytest.approx(a[1] / a.sum(), rel=1e-6)


def test_without_features_the_unseen_are_taken_for_the_mean():
    curate = dots(refresh=2)
    play(curate, TASKS, 0, 1.0)
    play(curate, TASKS, 1, 0.0, 0.0, 1.0, 1.0)
    assert curate.difficulty().tolist() == [0.0, 0.5, 0.25, 0.25]


def test_references_are_those_measured_last():
    curate = dots(refresh=3, references=1)
    for place, reward in ((0, 1.0), (1, 1.0), (2, 0.0)):
        play(curate, TASKS, place, reward)
    assert curate.difficulty()[3] == 1.0


def test_a_feature_that_is_missing_or_broken_names_the_task():
    rows = [Task(key="a", features={"x": np.ones(2)}), Task(key="b", features={"y": np.ones(2)})]
    with pytest.raises(ConfigError, match=r"Dots: task 'b' of 'f' has no feature 'x' \(it has: y\)"):
        dots(ListTasks("f", rows), feature="x")
    for value, message in ((np.ones(3), r"has shape \[3\], others \[2\]"), (np.array([np.nan, 1]), "not finite")):
        with pytest.raises(ConfigError, match=f"task 'b'.*{message}"):
            dots(ListTasks("f", [rows[0], Task(key="b", features={"x": value})]), feature="x")


# ── FilterSolved ──


def filtered(**more) -> FilterSolved:
    return FilterSolved(TASKS, **{"group_size": 4, "reward_range": RANGE, **more})


def test_what_is_solved_is_left_out():
    curate = filtered(probe=0.0)
    play(curate, TASKS, 1, 1.0, 1.0)
    play(curate, TASKS, 2, 1.0, 0.0)
    assert curate.solved == 1
    assert sorted(admitted(curate, 6)) == sorted(["rows0", "rows2", "rows3"] * 2)


def test_probes_are_as_many_as_said_and_take_turns():
    curate = filtered(probe=0.2)
    play(curate, TASKS, 0, 1.0)
    play(curate, TASKS, 1, 1.0)
    found = admitted(curate, 2000)
    probes = [key for key in found if key in ("rows0", "rows1")]
    assert abs(len(probes) / 2000 - 0.2) < 4 * (0.2 * 0.8 / 2000) ** 0.5
    assert all(a != b for a, b in itertools.pairwise(probes)), "the one not played for longest"


def test_a_probe_that_fails_brings_the_task_back():
    curate = filtered(probe=0.0)
    play(curate, TASKS, 0, 1.0)
    assert "rows0" not in admitted(curate, 8)
    play(curate, TASKS, 0, 1.0, 0.5)
    assert curate.solved == 0 and "rows0" in admitted(curate, 8)


def test_solved_means_so_many_rounds_in_a_row():
    curate = filtered(rounds=2, solved_at=0.75)
    play(curate, TASKS, 0, 1.0, 1.0, 1.0, 0.0)
    play(curate, TASKS, 0, 0.0, 1.0)
    play(curate, TASKS, 0, 1.0)
    assert curate.solved == 0
    play(curate, TASKS, 0, 1.0)
    assert curate.solved == 1


def test_with_everything_solved_there_are_only_probes():
    curate = filtered(probe=0.0)
    for place in range(4):
        play(curate, TASKS, place, 1.0)
    assert sorted(admitted(curate, 8)) == sorted([f"rows{i}" for i in range(4)] * 2)


# ── all of them ──

MAKE = {
    "Uniform": lambda seed: Uniform(TASKS, group_size=2, seed=seed),
    "Prioritised": lambda seed: prioritised(seed=seed, rest=1),
    "Dots": lambda seed: dots(seed=seed, refresh=3, references=2, rest=1),
    "Dots, by features": lambda seed: Dots(clustered(), group_size=2, feature="x", refresh=2, seed=seed),
    "FilterSolved": lambda seed: filtered(seed=seed, probe=0.4),
    "Mixture": lambda seed: Mixture([prioritised(), dots(source(9, "b"), refresh=2)], temperature=3.0, seed=seed),
}
REWARDS = st.sampled_from([(0.0, 0.0), (1.0, 1.0), (0.0, 1.0), (None,), (0.25, 0.5), (1e30,)])
STEP = st.one_of(st.none(), st.none(), st.tuples(st.integers(0, 3), REWARDS))


@pytest.mark.parametrize("name", MAKE)
@settings(max_examples=25, deadline=None)
@given(steps=st.lists(STEP, max_size=30), stop=st.integers(0, 30), seed=st.integers(0, 2))
def test_f70_the_same_choices_after_save_and_load(name, steps, stop, seed):
    tasks = clustered() if name == "Dots, by features" else TASKS

    def run(curate, part) -> list[str]:
        found = []
        for step in part:
            if step is None:
                found.append(curate.next().task.key)
            else:
                play(curate, tasks, step[0], *step[1])
        return found

    whole = run(MAKE[name](seed), steps)
    first = MAKE[name](seed)
    head = run(first, steps[:stop])
    second = MAKE[name](seed)
    second.load_state_dict(first.state_dict())
    assert head + run(second, steps[stop:]) == whole
    assert run(MAKE[name](seed), steps) == whole


@pytest.mark.parametrize("name", [name for name in MAKE if name != "Mixture"])
def test_seeds_differ_and_states_of_others_are_refused(name):
    assert len({tuple(admitted(MAKE[name](seed), 24)) for seed in range(5)}) == 5
    with pytest.raises(ConfigError, match="its seed changed from 0 to 1"):
        MAKE[name](1).load_state_dict(MAKE[name](0).state_dict())


@pytest.mark.parametrize("name", [name for name in MAKE if name != "Mixture"])
def test_other_tasks_begin_anew(name):
    curate = MAKE[name](0)
    fresh = curate.state_dict()
    admitted(curate, 5)
    for place in range(4):
        curate.observe(group(TASKS.task(place), [1.0, 1.0]))
    curate.load_state_dict({**curate.state_dict(), "learned": {}, "position": 0})
    assert admitted(curate, 9) == admitted(MAKE[name](0), 9)
    assert fresh["position"] == 0


@pytest.mark.parametrize("kind", [Uniform, Prioritised, Dots, FilterSolved])
def test_an_unbounded_source_is_refused(kind):
    unbounded = GeneratedTasks("numbers", lambda index: Task(key=str(index)))
    with pytest.raises(ConfigError, match=f"{kind.__name__} needs a task source of a known size"):
        kind(unbounded, group_size=2)
    with pytest.raises(ConfigError, match=f"{kind.__name__}.group_size must be at least 1, found 0"):
        kind(TASKS, group_size=0)


class Twice(ListTasks):
    """Gives the same key again."""

    def task(self, index):
        return super().task(index % 2)


def test_a_source_with_a_key_twice_is_refused():
    with pytest.raises(ConfigError, match="2 tasks of 'rows' have the key of another"):
        Uniform(Twice("rows", [Task(key=str(i)) for i in range(4)]), group_size=1)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (prioritised, {"memory": 1.5}, r"Prioritised.memory must be in \[0, 1\), found 1.5"),
        (prioritised, {"memory": 1.0}, r"Prioritised.memory must be in \[0, 1\), found 1.0"),
        (prioritised, {"rest": -1}, "Prioritised.rest must be at least 0, found -1"),
        (prioritised, {"unseen": -0.1}, "Prioritised.unseen"),
        (prioritised, {"least": 2}, "Prioritised.least"),
        (dots, {"tau": 0.0}, r"Dots.tau must be in \(0, inf\), found 0.0"),
        (dots, {"sharpness": float("inf")}, "Dots.sharpness"),
        (dots, {"target": 1.1}, "Dots.target"),
        (dots, {"references": 0}, "Dots.references must be at least 1"),
        (dots, {"refresh": 0}, "Dots.refresh must be at least 1"),
        (filtered, {"solved_at": 0.0}, r"FilterSolved.solved_at must be in \(0, 1\], found 0.0"),
        (filtered, {"rounds": 0}, "FilterSolved.rounds must be at least 1"),
        (filtered, {"probe": 1.1}, "FilterSolved.probe"),
    ],
)
def test_options_out_of_range_are_named(make, options, message):
    with pytest.raises(ConfigError, match=message):
        make(**options)


# ── mixtures by size ──


def part(count: int, name: str) -> Shuffled:
    return Shuffled(source(count, name), group_size=1)


@pytest.mark.parametrize(("temperature", "wanted"), [(1.0, 8.0), (3.0, 2.0), (1e9, 1.0)])
def test_a_mixture_by_sizes_takes_each_to_the_power_of_one_over_the_temperature(temperature, wanted):
    mixed = Mixture([part(16, "a"), part(2, "b")], temperature=temperature, seed=1)
    assert mixed.weights[0] / mixed.weights[1] == pytest.approx(wanted)
    found = [key[0] for key in admitted(mixed, 3000)]
    p = wanted / (wanted + 1)
    assert abs(found.count("a") / 3000 - p) < 4 * (p * (1 - p) / 3000) ** 0.5


def test_a_cold_mixture_draws_the_largest_and_does_not_overflow():
    mixed = Mixture([part(3, "a"), part(2, "b")], temperature=1e-6)
    assert {key[0] for key in admitted(mixed, 200)} == {"a"}


def test_bad_mixtures():
    unbounded = Shuffled(GeneratedTasks("n", lambda index: Task(key=str(index))), group_size=1)
    with pytest.raises(ConfigError, match=r"parts\[1\] \(Shuffled\) is unbounded or does not say: give weights"):
        Mixture([part(2, "a"), unbounded], temperature=1.0)
    for options in ({}, {"weights": [1], "temperature": 1.0}):
        with pytest.raises(ConfigError, match="either weights or temperature, and not both"):
            Mixture([part(2, "a")], **options)
    for temperature in (0.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"Mixture.temperature must be in \(0, inf\)"):
            Mixture([part(2, "a")], temperature=temperature)
    with pytest.raises(ConfigError, match="one weight per part"):
        Mixture([], temperature=1.0)
