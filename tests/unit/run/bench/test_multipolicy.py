"""The bench of policies without a barrier: what it prints adds up, and it tells who waits from who does not."""

from __future__ import annotations

import json
import math

import pytest

from astraflow.algorithms.base import Pace
from astraflow.algorithms.pace import BoundedStaleness
from astraflow.algorithms.pace_rounds import Barrier, Sync
from astraflow.run.bench.multipolicy import LATENCIES, SIGMA, Run, Took, measure


def test_what_it_prints_adds_up() -> None:
    found = measure(policies=2, steps=5, seed=1, latencies=(4,))
    json.dumps(found)
    assert found["virtual_time"] is True
    assert {len(found[key]) for key in ("speedup_vs_sync", "speedup_vs_barrier", "bound_ratio")} == {1}
    modes = found["modes"]["4"]
    assert set(modes) == {"default", "sync", "barrier"}
    ratio = modes["sync"]["wall_s"] / modes["default"]["wall_s"]
    assert found["speedup_vs_sync"]["4"] == pytest.approx(ratio, abs=0.01)
    for mode in modes.values():
        assert mode["bound_s"] == max(mode["busy_s"].values()) <= mode["wall_s"]
        assert 0 < mode["trained_tokens"] <= mode["generated_tokens"]
    assert ratio > 1.5, "waiting for the slowest tool of every batch costs something"


def played(pace: Pace, policies: int = 2, *, seed: int = 0) -> Took:
    return Run(policies=policies, steps=1, seed=seed, tool_s=5.0).under(pace)


def test_the_same_seed_gives_the_same_run_and_another_another() -> None:
    one = played(BoundedStaleness())
    assert one == played(BoundedStaleness())
    assert one != played(BoundedStaleness(), seed=1)


@pytest.mark.parametrize("pace", [BoundedStaleness(), Barrier(), Sync()])
def test_eight_policies_are_no_special_case(pace: Pace) -> None:
    took = played(pace, 8)
    assert len(took.busy_s) == 16
    assert took.bound_s <= took.wall_s


def test_costs_are_as_said() -> None:
    run = Run(policies=8, steps=1, seed=0, tool_s=0.0)
    assert run.step_s("m7") / run.step_s("m0") == pytest.approx(3.0)
    assert LATENCIES == (0, 1, 4)
    assert math.exp(2.326 * SIGMA) == pytest.approx(8.0)
