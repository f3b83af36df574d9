from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.algorithms.base import PolicyRoom
from astraflow.algorithms.pace import AllHaveRoom, BoundedStaleness, OnPolicy
from astraflow.errors import ConfigError


def room(
    alive: int = 0, *, max_staleness: int = 1, per_batch: int = 4, steps_left: int = 100, kept: int = 0, out: int = 0
):
    return PolicyRoom(
        version=0,
        max_staleness=max_staleness,
        groups_per_batch=per_batch,
        open_groups=alive,
        kept_groups=kept,
        batched_groups=out,
        steps_left=steps_left,
    )


@pytest.mark.parametrize(
    ("rooms", "answer"),
    [
        (room(0), True),
        (room(7), True),
        (room(8), False),
        (room(3, kept=3, out=2), False),
        (room(3, kept=2, out=2), True),
        (room(3, max_staleness=0), True),
        (room(4, max_staleness=0), False),
        (room(4, steps_left=1), False),
        (room(3, steps_left=1), True),
        (room(0, steps_left=0), False),
    ],
)
def test_alive_groups_are_what_the_bound_and_the_steps_left_can_use(rooms, answer):
    assert BoundedStaleness().may_admit({"m0": rooms}) is answer
    assert AllHaveRoom().may_admit({"m0": rooms}) is answer


def test_at_the_end_an_overtaken_group_is_not_counted_on_and_the_bound_holds_all_the_same():
    last = room(4, steps_left=1, max_staleness=2)
    assert not BoundedStaleness().may_admit({"m0": last})
    assert BoundedStaleness().may_admit({"m0": replace(last, overtaken_groups=1)})
    assert not BoundedStaleness().may_admit({"m0": replace(last, open_groups=5, overtaken_groups=1)})
    assert not BoundedStaleness().may_admit({"m0": replace(last, open_groups=12, overtaken_groups=12)})
    assert not BoundedStaleness().may_admit({"m0": replace(last, steps_left=0, overtaken_groups=4)})
    on_policy = room(4, steps_left=1, max_staleness=0)
    assert not BoundedStaleness().may_admit({"m0": replace(on_policy, overtaken_groups=4)})


def test_ahead_narrows_and_never_widens():
    assert not BoundedStaleness(ahead=0).may_admit({"m0": room(4)})
    assert BoundedStaleness(ahead=5).may_admit({"m0": room(7)})
    assert not BoundedStaleness(ahead=5).may_admit({"m0": room(8)})
    for pace in (BoundedStaleness, AllHaveRoom):
        with pytest.raises(ConfigError, match="ahead must be at least 0"):
            pace(ahead=-1)


def test_the_hungriest_policy_sets_the_pace_or_the_slowest():
    rooms = {"full": room(8), "hungry": room(2)}
    assert BoundedStaleness().may_admit(rooms)
    assert not AllHaveRoom().may_admit(rooms)


def test_a_policy_that_is_done_holds_nobody_up():
    rooms = {"done": room(0, steps_left=0), "hungry": room(2)}
    assert AllHaveRoom().may_admit(rooms)
    done = {"done": room(0, steps_left=0)}
    assert not AllHaveRoom().may_admit(done)
    assert not BoundedStaleness().may_admit(done)
    assert not AllHaveRoom().may_admit({})


@given(bound=st.integers(0, 4), per_batch=st.integers(1, 5), steps=st.integers(1, 12), keep=st.lists(st.booleans()))
def test_f55_admission_alone_never_blocks_and_never_goes_stale(bound, per_batch, steps, keep):
    """Groups open at once, are served first in first out; some are dropped. Every step happens, in time, none stale."""
    version, opened, kept, drops = 0, 0, [], list(keep)
    while version < steps:
        while BoundedStaleness().may_admit(
            {"m0": room(0, kept=len(kept), max_staleness=bound, per_batch=per_batch, steps_left=steps - version)}
        ):
            opened += 1
            if not (drops and drops.pop()):
                kept.append(version)
        batch, kept = kept[:per_batch], kept[per_batch:]
        assert len(batch) == per_batch, "nothing may be admitted, yet no batch is full: a deadlock"
        assert all(version - born <= bound for born in batch)
        version += 1
    assert not kept, "groups were opened that no step is left for"


def test_on_policy_admits_what_the_next_batch_needs_and_nothing_while_one_is_out():
    pace = OnPolicy()
    assert pace.may_admit({"m0": room(0, max_staleness=5)})
    assert pace.may_admit({"m0": room(2, kept=1, max_staleness=5)})
    assert not pace.may_admit({"m0": room(2, kept=2, max_staleness=5)}), "the batch is under way"
    assert not pace.may_admit({"m0": room(0, out=1)}), "also a smaller one"
    assert not pace.may_admit({"m0": room(0, steps_left=0)})


def test_on_policy_no_policy_may_have_a_batch_out_and_the_hungriest_sets_the_pace():
    assert OnPolicy().may_admit({"full": room(0, kept=4), "hungry": room(2)})
    assert not OnPolicy().may_admit({"trains": room(0, out=4), "hungry": room(2)})
    assert OnPolicy().may_admit({"done": room(0, out=4, steps_left=0), "hungry": room(2)})


@pytest.mark.parametrize("pace", [BoundedStaleness(), AllHaveRoom(), OnPolicy()])
def test_what_is_replayed_need_not_be_made(pace):
    replayed = replace(room(1, max_staleness=0), replayed_groups=2)
    assert pace.may_admit({"m0": replayed})
    assert not pace.may_admit({"m0": replace(replayed, open_groups=2)})
    assert pace.may_admit({"m0": room(2, max_staleness=0)})
