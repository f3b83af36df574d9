from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.algorithms.base import ReadyGroup
from astraflow.algorithms.select import EarliestDeadline, Fifo
from astraflow.algorithms.select_mix import WithSupervised
from astraflow.algorithms.select_replay import WithReplay
from astraflow.errors import ConfigError
from astraflow.testing.check_algorithm import check_algorithm


def ready(text: str) -> list[ReadyGroup]:
    """``s`` a supervised group, a digit one of that version; ids and arrivals in order."""
    return [ReadyGroup(group=n, min_version=None if c == "s" else int(c), arrival=n) for n, c in enumerate(text)]


def pick(text: str, *, need=4, oldest_open=None, share=0.25, select=None) -> list[int]:
    return WithSupervised(select or Fifo(), share=share).pick(ready(text), need=need, oldest_open=oldest_open)


def test_each_batch_has_its_share():
    assert pick("s1s1s111") == [1, 3, 5, 0]
    assert pick("s1s1s111", share=0.5) == [1, 3, 0, 2]
    assert pick("s1s1s111", share=0, need=3) == [1, 3, 5]
    assert pick("1" * 8 + "ss", share="0.29", need=7) == [0, 1, 2, 3, 4, 8, 9], "2.03 of 7"


def test_the_others_are_picked_as_ever():
    assert pick("s3211", select=EarliestDeadline()) == [3, 4, 2, 0]


@pytest.mark.parametrize("need", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("share", ["0.1", "0.25", "0.3", "0.5", "1/3"])
def test_over_batches_the_share_is_right(need, share):
    """Rounding each batch by itself would give none of 1 group at .25, and half of 2."""
    mix = WithSupervised(Fifo(), share=share)
    of_batch = [sum(n < 8 for n in mix.pick(ready("s" * 8 + "1" * 8), need=need, oldest_open=None)) for _ in range(400)]
    exact = need * Fraction(share)
    assert set(of_batch) <= {int(exact), int(exact) + 1}
    for batches in (40, 400):
        assert abs(sum(of_batch[:batches]) - batches * exact) <= 2
    for every, first in ((2, 0), (2, 1), (3, 2)):
        turns = of_batch[first::every]
        assert abs(sum(turns) - len(turns) * exact) <= 4, "a policy that takes turns with others has it too"


def test_what_was_not_picked_is_no_batch():
    mix = WithSupervised(Fifo(), share=0.5)
    assert mix.pick(ready("s"), need=3, oldest_open=9) == []
    assert mix.state_dict() == WithSupervised(Fifo(), share=0.5).state_dict()


def test_missing_supervised_groups_are_made_up_for():
    assert pick("1111") == [0, 1, 2, 3]
    assert pick("1111s", share=0.5) == [0, 1, 2, 4]


def test_missing_others_are_waited_for_as_long_as_any_is_open():
    assert pick("ss11", oldest_open=9) == []
    assert pick("ssss", oldest_open=9) == []


def test_a_queue_of_nothing_but_supervised_groups_is_no_standstill():
    assert pick("ss11") == [2, 3, 0, 1]
    assert pick("ssss") == [0, 1, 2, 3]
    assert pick("sss") == [], "not enough of anything"


def test_all_supervised_by_share():
    assert pick("ss", share=0.9, need=2) == [0, 1]


@given(text=st.text("s12", max_size=10), need=st.integers(1, 6), share=st.sampled_from([0, 0.25, 0.5, 0.9]))
def test_full_or_nothing_and_never_less_supervised_than_could_be(text, need, share):
    for oldest_open in (None, 20):
        picked = pick(text, need=need, share=share, oldest_open=oldest_open)
        assert len(picked) in (0, need) and len(set(picked)) == len(picked)
        if oldest_open is None:
            assert len(picked) == (need if len(text) >= need else 0), "with nothing open nothing is waited for"


def test_conformance():
    check_algorithm(lambda: WithSupervised(EarliestDeadline(window=6), share=0.3))
    check_algorithm(lambda: WithReplay(WithSupervised(Fifo(), share=0.3), ratio=0.3, order="uniform"))


@pytest.mark.parametrize("share", [1, -0.1, float("nan"), float("inf"), "a third", "1/0"])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(ConfigError, match=r"in \[0, 1\), found '?" + str(share)):
        WithSupervised(Fifo(), share=share)


def test_f98_replay_inside_it_would_never_replay():
    with pytest.raises(ConfigError, match="WithReplay inside it would never be asked to; put WithReplay around"):
        WithSupervised(WithReplay(Fifo(), ratio=0.3), share=0.3)
