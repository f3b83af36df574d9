"""The bench of policies without a barrier: what it prints adds up, and it tells who waits from who does not."""

from __future__ import annotations

import json
import math

import pytest

from astraflow.algorithms.base import Pace
from astraflow.algorithms.pace import BoundedStaleness
from astraflow.algorithms.pace_rounds import Barrier, Sync
from astraflow.run.bench._workload import ADMISSION, LOOK_S, SIGMA, SLOTS, TICK_S, TOOLS, Run, Stage, Took
from astraflow.run.bench.multipolicy import FIGURES, LATENCIES, measure
from astraflow.testing.fake_engine import FakeEngine


def test_what_it_prints_adds_up() -> None:
    found = measure(policies=2, steps=4, seeds=(1,), latencies=(4,))
    json.dumps(found)
    assert found["virtual_time"] is True
    assert {len(found[key]) for key in ("speedup_vs_sync", "speedup_vs_barrier", "bound_ratio")} == {1}
    modes = {name: only for name, (only,) in found["modes"]["4"].items()}
    assert set(modes) == {"default", "sync", "barrier"}
    per_token = {name: mode["wall_s"] / mode["trained_tokens"] for name, mode in modes.items()}
    ratio = per_token["sync"] / per_token["default"]
    assert found["speedup_vs_sync"]["4"] == pytest.approx(ratio, abs=0.01)
    assert found["spread"]["speedup_vs_sync"]["4"] == [found["speedup_vs_sync"]["4"]] * 2
    for mode in modes.values():
        assert mode["needed_s"] <= mode["bound_s"] == max(mode["busy_s"].values()) <= mode["wall_s"]
        assert 0 < mode["trained_tokens"] <= mode["generated_tokens"]
    assert ratio > 1.5, "waiting for the slowest tool of every batch costs something"


def test_whoever_does_not_work_waits_for_somebody() -> None:
    took = Run(policies=2, steps=4, seed=0, tool_s=5.0).under(BoundedStaleness())
    for who, busy_s in took.busy_s.items():
        until_s = took.wall_s if who in ("engine m0", "engine m1", "trainer m1") else None
        waited_s = sum(took.waits_s[who].values())
        if until_s is None:
            assert busy_s + waited_s <= took.wall_s + 4 * LOOK_S, "its trainer ends before the last"
        else:
            assert busy_s + waited_s == pytest.approx(until_s, rel=0.05)
    assert took.waits_s["engine m1"][TOOLS] > 1
    assert took.waits_s["engine m0"].keys() <= {ADMISSION}


def test_who_waits_for_whom_is_where_most_of_what_is_to_come_is() -> None:
    stage = Stage(
        engines={name: FakeEngine(policy=name, slots=SLOTS) for name in ("a", "b")}, step_s={"a": 1.0, "b": 1.0}
    )
    stage.look()
    assert {who: dict(found) for who, found in stage.waits.items()} == {
        name: {ADMISSION: LOOK_S} for name in ("engine a", "engine b", "trainer a", "trainer b")
    }
    stage.engines["a"].busy, stage.engines["a"].waiting, stage.at_tools = SLOTS, 2, 7
    stage.stepping, stage.done = {"a"}, {"b"}
    stage.look()
    assert stage.waits["engine b"] == {ADMISSION: LOOK_S, TOOLS: LOOK_S}
    assert stage.waits["engine a"] == {ADMISSION: LOOK_S}
    stage.engines["a"].busy, stage.engines["b"].busy, stage.done = 1, 9, set()
    stage.look()
    assert stage.waits["engine a"][ADMISSION] == pytest.approx(LOOK_S * 1.75), "three of four slots were free"
    assert stage.waits["trainer b"] == {ADMISSION: LOOK_S, "engine b": LOOK_S}
    assert stage.waits["trainer a"] == {ADMISSION: LOOK_S}


def test_the_steady_state_is_what_the_busiest_did_between_the_quarters() -> None:
    stage = Stage(engines={}, step_s={"a": 1.0, "b": 3.0})
    for step in range(8):
        stage.stepped("a", 2.0 * step)
        stage.stepped("b", 4.0 * step)
    assert stage.steady_ratio() == pytest.approx(3.0 / 4.0)


def test_figures_are_by_time_per_trained_token_and_surplus_is_no_gain() -> None:
    def took(wall_s: float, *, trained: int = 100, generated: int = 100, busy_s: float = 5.0) -> Took:
        return Took(
            wall_s=wall_s,
            busy_s={"engine": busy_s, "trainer": 1.0},
            waits_s={},
            needed_s=4.0,
            steady_ratio=1.0,
            generated=generated,
            trained=trained,
        )

    modes = {"default": [took(10.0, generated=125)], "sync": [took(30.0, trained=50)], "barrier": [took(12.0)]}
    found = {name: figure(modes)[0] for name, figure in FIGURES.items()}
    assert found == pytest.approx(
        {
            "speedup_vs_sync": 6.0,
            "speedup_vs_barrier": 1.2,
            "bound_ratio": 0.5,
            "needed_ratio": 0.4,
            "steady_ratio": 1.0,
            "surplus": 0.25,
            "barrier_over_bound": 2.4,
        }
    )


def played(pace: Pace, policies: int = 2, *, seed: int = 0) -> Took:
    return Run(policies=policies, steps=1, seed=seed, tool_s=5.0).under(pace)


def test_the_same_seed_gives_the_same_run_and_another_another() -> None:
    one, again, other = (played(Sync(), seed=seed) for seed in (0, 0, 1))
    assert (one.wall_s, one.busy_s, one.waits_s) == (again.wall_s, again.busy_s, again.waits_s)
    assert one.wall_s != other.wall_s


def test_episodes_are_as_long_under_every_schedule() -> None:
    """What differs is waiting alone: where nothing is surplus, the same tokens are generated."""
    took = [
        Run(policies=2, steps=2, seed=0, tool_s=0.0).under(pace) for pace in (BoundedStaleness(), Barrier(), Sync())
    ]
    assert len({(each.generated, each.trained, tuple(each.busy_s.values())) for each in took}) == 1
    assert took[0].wall_s < took[2].wall_s


@pytest.mark.parametrize("pace", [BoundedStaleness(), Barrier(), Sync()])
def test_eight_policies_are_no_special_case(pace: Pace) -> None:
    took = played(pace, 8)
    assert len(took.busy_s) == 16
    assert took.bound_s <= took.wall_s


def test_costs_are_as_said() -> None:
    run = Run(policies=8, steps=1, seed=0, tool_s=100.0)
    assert run.step_s("m7") / run.step_s("m0") == pytest.approx(3.0)
    assert LATENCIES == (0, 1, 4)
    assert math.exp(2.326 * SIGMA) == pytest.approx(8.0)
    alone_s = run.generation_s(episodes=20)
    assert 0.5 < alone_s / (8 * 12 * TICK_S) < 1.5, "eight replies of a dozen tokens, without the tool"
