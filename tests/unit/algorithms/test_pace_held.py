"""Data held until it is exactly so many versions old: what a delay line admits and when it lets a step happen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.algorithms.base import PolicyRoom, StepPace
from astraflow.algorithms.pace_held import HeldStaleness
from astraflow.errors import ConfigError
from astraflow.testing.check_algorithm import check_algorithm

GROUPS = 2


def room(version: int = 0, *, opened: int = 0, kept: int = 0, out: int = 0, left: int = 100) -> PolicyRoom:
    return PolicyRoom(
        version=version,
        max_staleness=9,
        groups_per_batch=GROUPS,
        open_groups=opened,
        kept_groups=kept,
        batched_groups=out,
        steps_left=left,
    )


@pytest.mark.parametrize(
    ("lag", "state", "admits", "steps"),
    [
        (0, room(), True, False),
        (0, room(opened=2), False, False),
        (0, room(kept=2), False, True),
        (0, room(kept=1, opened=1), False, False),
        (3, room(kept=2), True, False),
        (3, room(kept=7, opened=1), False, False),
        (3, room(kept=8), False, True),
        (3, room(kept=6, out=2), False, False),
        (3, room(kept=4, left=2), False, True),
        (3, room(kept=3, left=2), True, False),
    ],
)
def test_a_step_needs_a_full_line_and_nothing_is_sampled_while_one_is_under_way(
    lag: int, state: PolicyRoom, admits: bool, steps: bool
) -> None:
    pace = HeldStaleness(lag=lag)
    assert pace.may_admit({"p": state}) is admits
    assert pace.may_step("p", {"p": state}) is steps


@settings(max_examples=30)
@given(st.integers(0, 6), st.integers(1, 20), st.randoms(use_true_random=False))
def test_every_step_past_the_first_is_exactly_so_old_whatever_order_groups_close_and_are_dropped_in(
    lag: int, steps: int, dice: object
) -> None:
    """The queue of the dataflow, played: oldest first, groups close at random, some are dropped."""
    random = dice.random  # type: ignore[attr-defined]
    pace, version, open_groups, kept, ages = HeldStaleness(lag=lag), 0, [], [], []  # type: ignore[var-annotated]
    while version < steps:
        rooms = {"p": room(version, opened=len(open_groups), kept=len(kept), left=steps - version)}
        if pace.may_step("p", rooms):
            batch, kept = sorted(kept)[:GROUPS], sorted(kept)[GROUPS:]
            assert len(batch) == GROUPS
            ages.append({version - sampled for sampled in batch})
            version += 1
        elif pace.may_admit(rooms) and random() < 0.7:
            open_groups.append(version)
        elif open_groups:
            sampled = open_groups.pop(int(random() * len(open_groups)))
            if random() < 0.8:
                kept.append(sampled)
        else:
            assert pace.may_admit(rooms), "neither a step nor a group nor anything that ends: it would hang"
    assert ages == [{min(lag, each)} for each in range(steps)]
    assert not kept
    assert not open_groups, "nothing was sampled in vain"


def test_the_line_is_the_policys_own() -> None:
    pace = HeldStaleness(lag=1)
    rooms = {"a": room(kept=4), "b": room(kept=1)}
    assert pace.may_step("a", rooms)
    assert not pace.may_step("b", rooms)
    assert pace.may_admit(rooms)
    assert not pace.may_admit({"a": room(kept=4), "b": replace(room(), steps_left=0)})


def test_a_lag_below_0_is_refused_and_the_kit_accepts_it() -> None:
    with pytest.raises(ConfigError, match="at least 0 versions, found -1"):
        HeldStaleness(lag=-1)
    check_algorithm(lambda: HeldStaleness(lag=2))
    assert isinstance(HeldStaleness(lag=2), StepPace)
