"""The bench of assignment, small: fewer episodes are begun in vain, and more of what was sampled is trained."""

from __future__ import annotations

import pytest

from astraflow.run.bench.assign import SPEEDS, Plan, compare
from astraflow.types import Lease, Purpose, Task


@pytest.mark.slow
def test_by_measured_speed_less_is_played_in_vain() -> None:
    """In virtual time: the figures are the same on every machine."""
    found = compare(Plan(seed=1, steps=100))
    assert found["stale_episodes_ratio"] < 0.7
    assert found["tokens_per_s_ratio"] > 1.05
    for mode in ("measured", "oldest_first"):
        assert all(found[mode]["trained_by"][name] > 0 for name in SPEEDS)


def test_an_episode_is_as_long_whoever_plays_it() -> None:
    task = Task(key="7", dataset="numbers")
    leases = [
        Lease(
            group=3, index=1, attempt=attempt, task=task, purpose=Purpose.TRAIN, seed=attempt, ttl_s=1, time_limit_s=1
        )
        for attempt in (1, 2)
    ]
    plan = Plan(seed=1)
    assert plan.length(leases[0]) == plan.length(leases[1]) >= 4
    assert plan.length(leases[0]) != Plan(seed=2).length(leases[0])
