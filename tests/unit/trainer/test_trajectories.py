"""Which rows a return runs through."""

from __future__ import annotations

import msgspec
import numpy as np

from astraflow.trainer.trajectories import Trajectories
from tests.unit.trainer.test_packing import row


def of(*names: str, uses: tuple[int, ...] = ()) -> Trajectories:
    rows = [row([1, 2], [1], name=name) for name in names]
    rows = [msgspec.structs.replace(each, use=use) for each, use in zip(rows, uses or [0] * len(rows), strict=True)]
    return Trajectories.of(rows)


def test_samples_of_an_agent_in_an_episode_are_one_trajectory() -> None:
    found = of("1/0/a/0", "1/0/b/0", "1/1/a/0", "2/0/a/0", "1/0/a/1")
    assert found.number.tolist() == [0, 1, 2, 3, 0]
    assert [int(n) for n in np.argsort(found.rank)] == [0, 4, 1, 2, 3]


def test_samples_follow_each_other_by_number_not_by_name_or_place() -> None:
    found = of("1/0/a/10", "1/0/a/9", "1/0/a/2")
    assert np.argsort(found.rank).tolist() == [2, 1, 0]


def test_what_is_replayed_is_another_trajectory() -> None:
    assert of("1/0/a/0", "1/0/a/0", uses=(0, 1)).number.tolist() == [0, 1]


def test_no_rows_are_no_trajectories() -> None:
    assert len(Trajectories.of([]).rank) == 0
