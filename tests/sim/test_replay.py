"""Runs under every fault, told again by their own algorithms: crashes in mid-transaction, restarts, doubled messages,
trainers that go back and operators who roll back leave no decision that the record does not explain."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from astraflow.run.replay.figures import Comparison, compared, figures_of, happened, signals_of
from astraflow.run.replay.record import read_record
from astraflow.run.replay.rerun import Rerun
from astraflow.run.run_db import RunDb
from astraflow.testing.simulator import parts as simulated
from astraflow.testing.simulator import simulate
from astraflow.testing.simulator.parts import run_spec
from astraflow.testing.simulator.plan import Plan
from astraflow.testing.simulator.world import World

SEEDS = range(2000, 2008)


def told_again(world: World) -> Comparison:
    again = Rerun(run_spec(world.plan), read_record(RunDb(world.database.keeper), Path("nowhere"))).run()
    assert figures_of(again) == happened(again.record, again.spec, signals_of(again))
    return compared(again)


@pytest.mark.parametrize("chunk", range(2))
def test_runs_under_faults_decide_again_as_recorded(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of pruned groups only the scores are left, which are no rewards where a critic has its own.
    monkeypatch.setattr(simulated, "LIMITS", dataclasses.replace(simulated.LIMITS, retain="all"))
    found: list[Comparison] = []
    judge: Any = World._judge

    def judged(world: World) -> Any:
        outcome = judge(world)
        found.append(told_again(world))
        return outcome

    monkeypatch.setattr(World, "_judge", judged)
    seeds = SEEDS[chunk * 4 : chunk * 4 + 4]
    for seed in seeds:
        simulate(seed, Plan.draw(seed))
        assert found[-1].differences == (), f"seed {seed}"
    assert len(found) == len(seeds) and sum(each.batches for each in found) > 8
