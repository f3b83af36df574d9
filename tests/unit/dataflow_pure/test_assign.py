"""Which worker gets which episode: never idle for nothing, never late where somebody is in time, never starved."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from astraflow.dataflow.assign import ALIKE, Paces, Work, assign, chosen
from astraflow.dataflow.episodes import Place

FAST, MIDDLE, SLOW = 0.01, 0.017, 0.033
POOL = (FAST, MIDDLE, SLOW)


def work(number: int, tokens: float, left_s: float = 10.0, *, overdue: bool = False) -> Work:
    return Work(place=(number, 0), tokens=tokens, left_s=left_s, overdue=overdue)


def given_to(train: list[Work], own: float, pool: tuple[float, ...] = POOL, *, count: int = 99) -> list[int]:
    places = assign(train, [], paces=Paces(own=own, all=pool), count=count, held_train=0, held_eval=0, eval_share=0.25)
    return [group for group, _ in places]


@pytest.mark.parametrize(
    ("train", "evals", "count", "held", "expected"),
    [
        (4, 4, 4, (0, 0), (1, 3)),
        (4, 4, 4, (0, 1), (0, 4)),
        (0, 4, 3, (0, 9), (3, 0)),
        (1, 4, 4, (0, 0), (3, 1)),
        (4, 0, 2, (5, 0), (0, 2)),
        (9, 9, 1, (0, 0), (1, 0)),
        (9, 9, 8, (8, 0), (4, 4)),
        (0, 0, 5, (0, 0), (0, 0)),
    ],
)
def test_assign(train: int, evals: int, count: int, held: tuple[int, int], expected: tuple[int, int]) -> None:
    """(evaluation, training) leases given."""
    places = assign(
        [Work(place=(2, i)) for i in range(train)],
        [(1, i) for i in range(evals)],
        paces=None,
        count=count,
        held_train=held[0],
        held_eval=held[1],
        eval_share=0.25,
    )
    lane = [p for p in places if p[0] == 1]
    assert (len(lane), len(places) - len(lane)) == expected
    assert lane == sorted(lane)


# ── who is fast enough ──


def test_long_ones_go_to_fast_workers_and_slow_ones_get_what_they_finish_in_time() -> None:
    """10 s are left: the fast one plays 1000 tokens in them, the middle one 588, the slow one 303."""
    pending = [work(0, 300), work(1, 900), work(2, 500), work(3, 300), work(4, 1000)]
    assert given_to(pending, SLOW) == [0, 3]
    assert given_to(pending, MIDDLE) == [2, 0, 3]
    assert given_to(pending, FAST) == [1, 4, 2, 0, 3]
    assert given_to(pending, FAST, count=3) == [1, 4, 2]


def test_what_nobody_finishes_in_time_goes_to_the_fastest() -> None:
    hopeless = [work(0, 5000), work(1, 100, left_s=-3.0)]
    assert given_to(hopeless, FAST) == [0, 1]
    assert given_to(hopeless, MIDDLE) == given_to(hopeless, SLOW) == []
    almost = FAST * ALIKE * 0.99
    assert given_to(hopeless, almost, (FAST, almost, SLOW)) == [0, 1]


def test_what_has_waited_too_long_goes_to_whoever_asks_and_first() -> None:
    """The fastest worker may be alive and never ask again."""
    pending = [work(0, 5000), work(1, 100), work(2, 5000, overdue=True)]
    assert given_to(pending, SLOW) == [2, 1]
    assert given_to(pending, FAST) == [2, 0, 1]


def test_the_task_of_no_known_length_and_the_one_that_is_never_stale_suit_everybody() -> None:
    assert given_to([work(0, 0.0), work(1, 1e9, left_s=inf)], SLOW) == [0, 1]


# ── for every pool and every queue ──

few = settings(max_examples=40, deadline=None)
paces_s = st.floats(1e-4, 10.0)
pools = st.lists(paces_s, min_size=1, max_size=6).map(lambda all_: tuple(sorted(all_)))
one = st.tuples(
    st.one_of(st.just(0.0), st.floats(1.0, 1e5)),
    st.one_of(st.just(inf), st.floats(-100.0, 1e4)),
    st.booleans(),
)
queues = st.lists(one, max_size=12).map(
    lambda rows: [work(n, tokens, left_s, overdue=overdue) for n, (tokens, left_s, overdue) in enumerate(rows)]
)


def asked(train: list[Work], own: float, pool: tuple[float, ...], count: int) -> list[Place]:
    return assign(train, [], paces=Paces(own=own, all=pool), count=count, held_train=0, held_eval=0, eval_share=0.25)


@few
@given(queues, pools, st.integers(0, 5), st.integers(0, 12))
def test_never_idle_while_there_is_something_that_it_could_finish(
    train: list[Work], pool: tuple[float, ...], who: int, count: int
) -> None:
    own = pool[who % len(pool)]
    places = asked(train, own, pool, count)
    possible = [each for each in train if each.overdue or each.tokens * own < each.left_s * (1 - 1e-9)]
    assert len(places) >= min(count, len(possible))
    assert len(set(places)) == len(places) <= count
    for each in train:
        if each.place in places and not each.overdue:
            in_time = each.tokens * own <= each.left_s + 1e-6 * max(1.0, abs(each.left_s))
            assert in_time or own <= pool[0] * ALIKE * (1 + 1e-9), "only the fastest may be late"


@few
@given(queues, pools)
def test_nothing_starves(train: list[Work], pool: tuple[float, ...]) -> None:
    """Whatever is pending, the fastest worker gets it; what is overdue anybody, and before everything else."""
    assert sorted(asked(train, pool[0], pool, len(train))) == [each.place for each in train]
    overdue = [each.place for each in train if each.overdue]
    for own in pool:
        assert asked(train, own, pool, len(overdue)) == overdue


@few
@given(queues, paces_s)
def test_one_worker_alone_gets_everything_the_oldest_first(train: list[Work], own: float) -> None:
    alone = asked(train, own, (own,), len(train))
    overdue = {each.place for each in train if each.overdue}
    assert alone == sorted(overdue) + sorted({each.place for each in train} - overdue)


@few
@given(queues, pools, st.integers(0, 5))
@example([work(0, 100), work(1, 100), work(2, 100)], POOL, 2)
def test_oldest_first_among_equals(train: list[Work], pool: tuple[float, ...], who: int) -> None:
    paces = Paces(own=pool[who % len(pool)], all=pool)
    found = chosen(train, paces)
    for before, after in pairwise(found):
        if (before.overdue, paces.able(before)) == (after.overdue, paces.able(after)):
            assert before.place < after.place


@few
@given(queues, st.integers(0, 12))
def test_equal_paces_are_plain_age(train: list[Work], count: int) -> None:
    """No pool of equal machines is given out in another order than before there were paces."""
    places = assign(train, [], paces=None, count=count, held_train=0, held_eval=0, eval_share=0.25)
    assert places == [each.place for each in train[:count]]


@few
@given(queues, pools, st.integers(0, 5))
def test_a_faster_worker_may_play_whatever_a_slower_one_may(
    train: list[Work], pool: tuple[float, ...], who: int
) -> None:
    slow = Paces(own=pool[who % len(pool)], all=pool)
    for own in pool[: who % len(pool)]:
        assert set(map(id, chosen(train, slow))) <= set(map(id, chosen(train, Paces(own=own, all=pool))))
