"""As many groups as a full batch will take, given how many of them had a signal."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.algorithms.base import PolicyRoom
from astraflow.algorithms.curate import Greso, OverSampled
from astraflow.algorithms.pace import has_room
from astraflow.errors import ConfigError
from tests.unit.algorithms.curate_build import group, source


class Known:
    def __init__(self, signal_share: float) -> None:
        self.signal_share = signal_share


def room(*, opened: int = 0, kept: int = 0, batched: int = 0, staleness: int = 0, left: int = 9, **more) -> PolicyRoom:
    return PolicyRoom(
        version=0,
        max_staleness=staleness,
        groups_per_batch=8,
        open_groups=opened,
        kept_groups=kept,
        batched_groups=batched,
        steps_left=left,
        **more,
    )


@pytest.mark.parametrize(
    ("share", "state", "wanted"),
    [
        (1.0, {}, 8),
        (0.5, {}, 20),  # 1.25 x 8 / 0.5
        (0.5, {"kept": 6}, 5),
        (0.8, {"kept": 6}, 4),  # 3.125, rounded up
        (0.0, {}, 32),  # at most four times what is missing
        (0.5, {"kept": 8}, 0),
        (0.5, {"kept": 3, "batched": 8}, 0),
        (0.5, {"staleness": 1}, 40),
        (0.5, {"left": 0}, 0),
        (0.5, {"replayed_groups": 4}, 10),
    ],
)
def test_the_rollout_batch_is_what_is_missing_over_the_share_with_signal(share, state, wanted):
    pace = OverSampled(curate=Known(share))
    assert pace.wanted(room(**state)) == wanted
    opened = 0
    while pace.may_admit({"p": room(opened=opened, **state)}):
        opened += 1
    assert opened == wanted


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(0, 20), st.integers(0, 20), st.integers(0, 3), st.integers(0, 4))
def test_with_a_signal_everywhere_it_is_plain_back_pressure(opened, kept, batched, staleness, left):
    state = room(opened=opened, kept=kept, batched=batched, staleness=staleness, left=left)
    assert OverSampled(curate=Known(1.0)).may_admit({"p": state}) == has_room(state)


@settings(deadline=None)
@given(st.floats(0, 1), st.floats(1, 3), st.floats(1, 8), st.integers(0, 8))
def test_never_less_than_is_missing_nor_more_than_allowed(share, margin, most, kept):
    wanted = OverSampled(curate=Known(share), margin=margin, most=most).wanted(room(kept=kept))
    assert 8 - kept <= wanted <= -(-(8 - kept) * max(most, 1) // 1) + 1


def test_it_follows_greso_after_each_version():
    tasks = source(8)
    curate = Greso(tasks, group_size=2, reward_range=(0.0, 1.0))
    pace = OverSampled(curate=curate)
    assert pace.wanted(room()) == 8
    for place, rewards in enumerate(([0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.0, 1.0])):
        curate.observe(group(tasks.task(place), rewards, version=0))
    assert pace.wanted(room()) == 8, "the version is not over"
    curate.observe(group(tasks.task(4), [0.0, 1.0], version=1))
    assert curate.signal_share == 0.5 and pace.wanted(room()) == 20


def test_bad_settings():
    with pytest.raises(ConfigError, match=r"OverSampled\.curate must know its signal_share, int does not"):
        OverSampled(curate=3)
    for name in ("margin", "most"):
        with pytest.raises(ConfigError, match=rf"OverSampled.{name} must be in \[1, inf\), found 0.5"):
            OverSampled(curate=Known(1.0), **{name: 0.5})
