"""Data algorithms on one task: accuracy against generated episodes, at equally many optimiser steps.

    vanilla       shuffled tasks, every group is trained
    ds            dynamic sampling: groups without variance are dropped and made up for
    greso         that, and tasks without signal of late are seldom played
    pods          of each group the half whose rewards differ most takes gradient
    dots          tasks solved about half of the time are drawn more often
    replay        three groups of ten come again
    ds+replay+greso

Generation and training take turns (at most what is replayed is stale), so that only the choice of data differs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astraflow.algorithms.base import Credit, Curate, Select
from astraflow.algorithms.credit import GroupMean
from astraflow.algorithms.curate import Dots, Greso, Shuffled
from astraflow.algorithms.keep import DropZeroVariance
from astraflow.algorithms.keep_subset import MaxVariance, OfSubset
from astraflow.algorithms.pace import BoundedStaleness
from astraflow.algorithms.pipeline import Pipeline
from astraflow.algorithms.select import EarliestDeadline
from astraflow.algorithms.select_replay import WithReplay
from astraflow.run.bench import _table
from astraflow.run.bench._cells import Cell, play_all, say
from astraflow.tasks.base import TaskSource

SEEDS = 3
STEPS = 60
GROUPS, SIZE = 10, 4
REPLAY = "0.3"
MAX_STALENESS = 4
"""How old what is replayed may be."""
LR = 1e-3
SUPERVISED = 100
EVALS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What differs between the runs."""

    curate: Callable[..., Curate] = Shuffled
    drop: bool = False
    subset: bool = False
    replay: bool = False

    def pipeline(self, tasks: TaskSource, seed: int) -> Pipeline:
        credit: Credit = GroupMean(std=True)
        select: Select = EarliestDeadline()
        subset = MaxVariance(keep=SIZE // 2)
        if self.replay:
            select = WithReplay(select, ratio=REPLAY, seed=seed)
        return Pipeline(
            curate=self.curate(tasks, group_size=SIZE, seed=seed),
            pace=BoundedStaleness(ahead=0),
            credit=OfSubset(subset=subset, credit=credit) if self.subset else credit,
            keep=(*((DropZeroVariance(),) if self.drop else ()), *((subset,) if self.subset else ())),
            select=select,
        )


CHOICES = {
    "vanilla": Choice(),
    "ds": Choice(drop=True),
    "greso": Choice(curate=Greso, drop=True),
    "pods": Choice(subset=True),
    "dots": Choice(curate=Dots),
    "replay": Choice(replay=True),
    "ds+replay+greso": Choice(curate=Greso, drop=True, replay=True),
}


def main(
    *,
    seeds: int = SEEDS,
    steps: int = STEPS,
    lr: float = LR,
    processes: int = 2,
    out: Path = Path("runs/bench-algorithms"),
) -> dict[str, Any]:
    began = time.monotonic()
    cells: list[Cell] = [
        {"bench": "algorithms", "seed": seed, "algorithm": name, "steps": steps, "lr": lr}
        for seed in range(seeds)
        for name in CHOICES
    ]
    played = play_all(__name__, cells, processes=processes, folder=out, say=say)
    result = {**table(played), "steps": steps, "lr": lr, "wall_s": round(time.monotonic() - began, 1)}
    _table.write(out, result, text(result))
    title = f"{steps} optimiser steps each, mean of {seeds} seeds"
    panels = {"held-out accuracy": curves(played)}
    _table.plot(out / "curve.png", panels, title=title, x_label="generated episodes", y_label="accuracy")
    return result


def play(cell: Cell, folder: Path) -> dict[str, Any]:
    """One run, in this process."""
    from astraflow.run.bench._drive import played
    from astraflow.run.bench._middle import pool

    tasks = pool()
    found, common = played(
        cell,
        folder,
        supervised=SUPERVISED,
        evals=EVALS,
        pipeline=CHOICES[cell["algorithm"]].pipeline(tasks.train, cell["seed"]),
        groups_per_batch=GROUPS,
        max_staleness=MAX_STALENESS,
        held_out=tasks.held_out,
    )
    return {
        "points": [[point.episodes, point.score] for point in found.points],
        "versions": [point.version for point in found.points],
        "replayed_groups": len(found.ages) * GROUPS - found.groups.get("trained", 0),
        "oldest": max((each.oldest for each in found.ages), default=None),
        **common,
    }


# ── what they say together ──


def table(played: Sequence[tuple[Cell, Any]]) -> dict[str, Any]:
    """``equal``: accuracy when as many episodes were played as the thriftiest run played in all."""
    budget = min(found["points"][-1][0] for _, found in played)
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(cell["algorithm"] for cell, _ in played):
        own = [found for cell, found in played if cell["algorithm"] == name]
        groups = [sum(found["groups"].values()) for found in own]
        rows.append(
            {
                "algorithm": name,
                "start": _table.spread([found["points"][0][1] for found in own]),
                "equal": _table.spread([_table.last_mean(found["points"], budget) for found in own]),
                "end": _table.spread([_at_the_end(found) for found in own]),
                "episodes": _table.spread([found["points"][-1][0] for found in own]),
                "dropped": _table.spread(
                    [1 - found["groups"].get("trained", 0) / count for found, count in zip(own, groups, strict=True)]
                ),
                "ended": [found["ended"] for found in own],
            }
        )
    failures = [f"{row['algorithm']}: {why}" for row in rows for why in row["ended"] if why]
    return {"rows": rows, "equal_episodes": budget, "failures": failures}


def _at_the_end(found: dict[str, Any]) -> float:
    """By steps: the episodes of the last ones say little about when they were."""
    points = list(zip(found["versions"], (score for _, score in found["points"]), strict=True))
    return _table.last_mean(points, points[-1][0])


def curves(played: Sequence[tuple[Cell, Any]]) -> dict[str, list[_table.Points]]:
    """Algorithm → the curve of each seed."""
    series: dict[str, list[_table.Points]] = {}
    for cell, found in played:
        series.setdefault(cell["algorithm"], []).append([(x, y) for x, y in found["points"]])
    return series


def text(result: dict[str, Any]) -> str:
    budget = f"{result['equal_episodes']:,}"
    rows = [["algorithm", "start", f"at {budget} episodes", "at the end", "episodes", "groups dropped", "ended early"]]
    for row in result["rows"]:
        early = [why for why in row["ended"] if why]
        rows.append(
            [
                row["algorithm"],
                *(_table.shown(row[name]) for name in ("start", "equal", "end")),
                f"{row['episodes']['mean']:,.0f}",
                f"{row['dropped']['mean']:.1%}",
                f"{len(early)} of {len(row['ended'])}",
            ]
        )
    said = f"{result['steps']} optimiser steps a run, lr {result['lr']:g}"
    return "\n".join([_table.lines(rows), said, *result["failures"]])
