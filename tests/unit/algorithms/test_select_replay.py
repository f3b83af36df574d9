from __future__ import annotations

import copy
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.algorithms.base import ReadyGroup, Replay, Select, StoredGroup
from astraflow.algorithms.select import EarliestDeadline, Fifo
from astraflow.algorithms.select_mix import WithSupervised
from astraflow.algorithms.select_replay import ORDERS, WithReplay
from astraflow.errors import ConfigError
from astraflow.testing.check_algorithm import check_algorithm
from tests.unit.dataflow_pure.build import pipeline


def ready(*groups: int) -> list[ReadyGroup]:
    return [ReadyGroup(group=group, min_version=5, arrival=n) for n, group in enumerate(groups)]


def stored(*groups: int, age: int = 1, uses: int = 1, advantage: float = 1.0) -> list[StoredGroup]:
    return [
        StoredGroup(group=group, age=age, arrival=n, uses=uses, advantage=advantage) for n, group in enumerate(groups)
    ]


def replay(ratio=0.5, **more) -> WithReplay:
    return WithReplay(Fifo(), ratio=ratio, **more)


class Turns:
    """Counts its answers."""

    def __init__(self):
        self.turns = 0

    def pick(self, ready, *, need, oldest_open):
        self.turns += 1
        return Fifo().pick(ready, need=need, oldest_open=oldest_open)

    def state_dict(self):
        return {"turns": self.turns}

    def load_state_dict(self, state):
        self.turns = state["turns"]


def pick(select, fresh, again, need=4, oldest_open=None, policy="p"):
    return select.pick_with(fresh, again, policy=policy, need=need, oldest_open=oldest_open)


def test_it_is_both():
    assert isinstance(replay(), Select) and isinstance(replay(), Replay)
    assert not isinstance(EarliestDeadline(), Replay)


@pytest.mark.parametrize("order", ORDERS)
def test_conformance(order):
    check_algorithm(lambda: WithReplay(EarliestDeadline(window=6), ratio="0.3", order=order))


def test_f63_a_batch_is_always_full():
    assert pick(replay(), ready(1, 2, 3, 4), stored(9)) == ([1, 2, 3], [9]), "the store lacks one: a fresh one more"
    assert pick(replay(), ready(1, 2), stored(7, 8, 9)) == ([1, 2], [8, 9])
    assert pick(replay(), ready(1), stored(7, 8, 9)) == ([], []), "too few fresh ones: not yet"
    assert pick(replay(), ready(1, 2, 3, 4), []) == ([1, 2, 3, 4], [])
    assert pick(replay(ratio=0.29), ready(*range(100)), stored(*range(200, 300)), need=100) == (
        list(range(71)),
        list(range(271, 300)),
    )


# ── the share over many batches ──

PLENTY = {"fresh": ready(*range(9)), "again": stored(*range(100, 109))}


def counts(select: WithReplay, needs: list[int], policy: str = "p") -> list[int]:
    return [len(pick(select, **PLENTY, need=need, policy=policy)[1]) for need in needs]


def test_what_rounding_leaves_is_carried_to_the_next_batch():
    assert counts(replay(ratio=0.3), [4] * 10) == [1, 1, 2, 1, 1] * 2, "3 of 10 groups, not 1 of 4"
    assert counts(replay(ratio="1/3"), [2] * 6) == [1, 0, 1] * 2
    assert counts(replay(ratio=0.1), [4] * 10) == [0, 1, 0, 1, 0] * 2, "rounded each by itself: never"


@given(
    ratio=st.fractions(0, 1, max_denominator=97).filter(lambda ratio: ratio < 1),
    needs=st.lists(st.integers(1, 9), min_size=1, max_size=60),
    restarts=st.sets(st.integers(0, 59)),
    policies=st.lists(st.sampled_from(["p", "q"]), min_size=60, max_size=60),
)
def test_the_share_is_exact_over_any_batches_of_each_policy_and_restarts(ratio, needs, restarts, policies):
    """After every batch, within half a group, wherever a batch can hold its share beside one fresh group."""
    select = replay(ratio=ratio)
    replayed, exact = Counter(), Counter()
    for number, (need, policy) in enumerate(zip(needs, policies, strict=False)):
        if need * ratio > need - 1:
            continue
        if number in restarts:
            state = copy.deepcopy(select.state_dict())
            select = replay(ratio=ratio)
            select.load_state_dict(state)
        replayed[policy] += counts(select, [need], policy)[0]
        exact[policy] += need * ratio
        assert abs(replayed[policy] - exact[policy]) <= Fraction(1, 2)


def test_policies_that_take_turns_have_their_share_each():
    """Carried over both, one would always round up and the other down."""
    select = replay(ratio=0.25)
    turns = [(counts(select, [2], "p")[0], counts(select, [2], "q")[0]) for _ in range(4)]
    assert turns == [(1, 1), (0, 0)] * 2


def test_share_tells_what_the_next_batch_takes_and_changes_nothing():
    select, again = replay(ratio=0.3), PLENTY["again"]
    for _ in range(5):
        told = {select.share(again, policy="p", need=4) for _ in range(3)}
        assert told == set(counts(select, [4]))


def test_what_the_store_lacked_or_was_asked_in_vain_is_not_owed():
    select = replay(ratio=0.5)
    for _ in range(5):
        assert pick(select, ready(1, 2, 3, 4), [], need=4)[1] == []
        assert pick(select, [], stored(7), need=4) == ([], [])
    assert counts(select, [4]) == [2], "no feast after the famine"
    most = replay(ratio=0.99)
    assert counts(most, [2] * 50) == [1] * 50, "one is always fresh; that is not owed either"


def test_ratio_zero_replays_nothing():
    assert pick(replay(ratio=0), ready(1, 2, 3, 4), stored(9)) == ([1, 2, 3, 4], [])


@pytest.mark.parametrize("ratio", [0.5, 0.99])
def test_one_group_of_a_batch_is_always_fresh(ratio):
    assert pick(replay(ratio=ratio), ready(1), stored(7, 8), need=1) == ([1], [])
    assert pick(replay(ratio=0.99), ready(1), stored(*range(7, 20)), need=4)[0] == [1]
    assert pick(replay(ratio=0.99), [], stored(*range(7, 20)), need=4) == ([], [])


def test_the_window_of_the_inner_choice_holds():
    select = WithReplay(EarliestDeadline(window=3), ratio=0.5)
    assert pick(select, ready(11, 12), stored(7, 8), oldest_open=10) == ([11, 12], [7, 8])
    assert pick(select, ready(12, 13), stored(7, 8), oldest_open=10) == ([], [])


def test_latest_is_the_youngest_then_the_last_that_closed():
    again = [*stored(7, 8, age=2), *stored(9, 10, age=1)]
    assert pick(replay(), ready(1, 2), again)[1] == [9, 10]
    assert pick(replay(ratio=0.25), ready(1, 2, 3), again)[1] == [10]


def test_replays_bound_how_often_a_group_comes_again():
    again = [*stored(7, uses=3), *stored(8, uses=2)]
    assert pick(replay(), ready(1, 2, 3), again) == ([1, 2], [7, 8])
    assert pick(replay(replays=2), ready(1, 2, 3), again) == ([1, 2, 3], [8])
    assert pick(replay(replays=1), ready(1, 2, 3), again) == ([], []), "a fourth fresh group is missing"
    assert replay(replays=2).share(again, policy="p", need=4) == 1


def draws(select, again, count=4000, need=4):
    found: Counter[int] = Counter()
    for _ in range(count):
        found.update(pick(select, ready(1, 2, 3, 4), again, need=need)[1])
    return found


def test_uniform_gives_each_the_same_chance_and_none_twice():
    found = draws(replay(order="uniform"), stored(*range(10, 18)))
    assert sum(found.values()) == 8000
    np.testing.assert_allclose([found[g] / 4000 for g in range(10, 18)], 0.25, atol=0.03)


def test_prioritised_goes_by_advantage_and_age():
    """One draw: weights 1, 3 and (2 versions old, decay 1/2) 4 / 4 = 1."""
    again = [
        StoredGroup(group=10, age=1, arrival=0, uses=1, advantage=1.0),
        StoredGroup(group=11, age=1, arrival=1, uses=1, advantage=3.0),
        StoredGroup(group=12, age=3, arrival=2, uses=1, advantage=4.0),
    ]
    found = draws(replay(ratio=0.25, order="prioritised"), again)
    np.testing.assert_allclose([found[g] / 4000 for g in (10, 11, 12)], [0.2, 0.6, 0.2], atol=0.03)
    sharper = draws(replay(ratio=0.25, order="prioritised", strength=2.0), again)
    np.testing.assert_allclose([sharper[g] / 4000 for g in (10, 11, 12)], [1 / 14, 9 / 14, 4 / 14], atol=0.03)


def test_prioritised_takes_what_has_no_advantage_last_and_still_at_random():
    again = [*stored(7, 8, advantage=0.0), *stored(9, advantage=1e-6)]
    assert all(9 in pick(replay(order="prioritised", seed=n), ready(1, 2), again)[1] for n in range(50))
    found = draws(replay(order="prioritised"), again, count=200)
    assert found[9] == 200 and min(found[7], found[8]) > 50


@given(
    order=st.sampled_from(ORDERS),
    fresh=st.integers(0, 8),
    again=st.integers(0, 8),
    need=st.integers(1, 8),
    ratio=st.sampled_from([0, 0.1, 0.3, "1/3", 0.5, 0.9]),
    data=st.data(),
)
def test_full_or_nothing_no_group_twice_and_the_listing_does_not_matter(order, fresh, again, need, ratio, data):
    groups, store = ready(*range(fresh)), stored(*range(100, 100 + again))
    answers = [
        pick(
            replay(ratio=ratio, order=order),
            data.draw(st.permutations(groups)),
            data.draw(st.permutations(store)),
            need,
        )
        for _ in range(2)
    ]
    assert answers[0] == answers[1]
    taken, replayed = answers[0]
    assert len(taken) + len(replayed) in (0, need)
    assert set(taken) <= set(range(fresh)) and set(replayed) <= set(range(100, 100 + again))
    assert (
        len(set(replayed)) == len(replayed) == (replay(ratio=ratio).share(store, policy="p", need=need) if taken else 0)
    )


@pytest.mark.parametrize("order", ["uniform", "prioritised"])
def test_its_draws_survive_a_restart(order):
    """Asked in vain in between: that changes nothing."""
    one, store = replay(order=order, seed=3), stored(*range(10, 30))
    first = [pick(one, ready(1, 2), store) for _ in range(3)]
    assert len({tuple(again) for _, again in first}) > 1
    pick(one, ready(1), store)
    state = copy.deepcopy(one.state_dict())
    rest = [pick(one, ready(1, 2), store) for _ in range(3)]
    two = replay(order=order, seed=3)
    two.load_state_dict(state)
    pick(two, [], store)
    assert [pick(two, ready(1, 2), store) for _ in range(3)] == rest
    with pytest.raises(ConfigError, match="seed changed from 3 to 4"):
        replay(order=order, seed=4).load_state_dict(state)


def test_a_state_from_before_a_field_was_added_goes_on():
    """``owed`` and ``batches`` came later: nothing was carried on, nothing counted."""
    one, store = WithReplay(WithSupervised(EarliestDeadline(), share=0), ratio=0.3, seed=3), stored(*range(10, 30))
    pick(one, ready(*range(1, 5)), store, need=4)
    state = one.state_dict()
    assert state["owed"] and state["select"]["batches"] == 1
    older = {"draws": 1, "seed": 3, "select": {"select": None}}
    two = WithReplay(WithSupervised(EarliestDeadline(), share=0), ratio=0.3, seed=3)
    pipeline(select=two).load_state_dict({"curate": pipeline().curate.state_dict(), "select": older})
    assert two.state_dict() == {"draws": 1, "owed": {}, "seed": 3, "select": {"batches": 0, "select": None}}


def test_the_state_of_the_inner_choice_is_kept_with_it():
    inner = Turns()
    outer = WithReplay(WithSupervised(inner, share=0), ratio=0.5)
    pick(outer, ready(1, 2, 3, 4), [])
    state = outer.state_dict()
    assert state["select"]["select"] == {"turns": 1}
    outer.load_state_dict({**state, "select": {**state["select"], "select": {"turns": 5}}})
    assert inner.turns == 5


def test_f98_replay_inside_replay_would_never_replay():
    with pytest.raises(ConfigError, match=r"WithReplay\.select must not replay by itself"):
        WithReplay(replay(), ratio=0.5)


@pytest.mark.parametrize("strength", [1.0, 0.01])
def test_groups_without_any_advantage_come_last_however_small_the_strength(strength):
    for seed in range(30):
        select = replay(order="prioritised", strength=strength, seed=seed)
        useful = StoredGroup(group=9, age=3, arrival=9, uses=1, advantage=1e-3)
        _, again = pick(select, ready(1, 2, 3), [*stored(10, 11, 12, advantage=0.0), useful], need=2)
        assert again == [9]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ratio": 1}, r"fraction must be in \[0, 1\), found 1"),
        ({"ratio": -0.1}, r"fraction must be in \[0, 1\), found -0.1"),
        ({"order": "newest"}, "order must be one of latest, uniform, prioritised, found 'newest'"),
        ({"replays": 0}, "replays must be at least 1"),
        ({"strength": -1}, r"strength must be in \[0, inf\), found -1"),
        ({"strength": float("nan")}, "strength must be"),
        ({"decay": 0}, r"decay must be in \(0, 1\], found 0"),
        ({"decay": 1.5}, r"decay must be in \(0, 1\], found 1.5"),
        ({"seed": -1}, "seed must be at least 0"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options, words):
    with pytest.raises(ConfigError, match=words):
        replay(**options)
