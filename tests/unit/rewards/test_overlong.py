"""Soft overlong punishment by numbers, and as a workflow applies it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from astraflow.errors import ConfigError
from astraflow.rewards.overlong import SoftOverlong
from astraflow.testing.virtual_loop import run_virtual
from astraflow.workflows.single_turn import SingleTurn
from tests.unit.workflows.test_single_turn import played


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [(0, 0.0), (16383, 0.0), (16384, 0.0), (17408, 0.25), (18432, 0.5), (20480, 1.0), (20481, 1.0), (10**6, 1.0)],
)
def test_the_paper_s_numbers(tokens: int, penalty: float) -> None:
    shape = SoftOverlong(longest=20480, buffer=4096)
    assert shape(1.0, tokens) == 1.0 - penalty
    assert shape(-1.0, tokens) == -1.0 - penalty
    assert SoftOverlong(longest=20480, buffer=4096, weight=0.5)(1.0, tokens) == 1.0 - penalty / 2


def test_it_never_grows_with_length_and_has_no_jump() -> None:
    shape = SoftOverlong(longest=10, buffer=4)
    found = [shape(0.0, tokens) for tokens in range(14)]
    assert found == [0.0] * 7 + [-0.25, -0.5, -0.75, -1.0, -1.0, -1.0, -1.0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"longest": 0, "buffer": 1}, "longest must be at least 1, found 0"),
        ({"longest": 8, "buffer": 0}, r"buffer must be in \[1, longest 8\], found 0"),
        ({"longest": 8, "buffer": 9}, "buffer .*found 9"),
        ({"longest": 8, "buffer": 2, "weight": -1.0}, "weight must be finite and >= 0, found -1"),
        ({"longest": 8, "buffer": 2, "weight": math.nan}, "weight .*found nan"),
    ],
)
def test_settings_out_of_range_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"SoftOverlong.{words}"):
        SoftOverlong(**options)


def test_a_workflow_shapes_the_grade_by_the_tokens_of_the_reply() -> None:
    seen: list[tuple[float, int]] = []

    def shape(reward: float, tokens: int) -> float:
        seen.append((reward, tokens))
        return reward - 0.5

    episode = run_virtual(lambda: played(SingleTurn(lambda text, task: 1.0, shape=shape)))
    (turn,) = episode.trajectories[0].turns
    assert episode.score == 0.5 and seen == [(1.0, turn.stop - turn.start)]
    unscored = run_virtual(lambda: played(SingleTurn(lambda text, task: None, shape=shape)))
    assert unscored.score is None and len(seen) == 1, "what was not graded is not shaped"
