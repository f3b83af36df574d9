"""Which groups first: oldest version against arrival, with and without a window, where episodes' times are long-tailed.

Time is the run's own (``_drive``). An answer is sampled when its episode begins and comes ``episode_s`` later, as where
a slow tool or grader follows it: log-normal, p99 / p50 = 8, half of the variance by task, so that slow tasks stay slow.
Meanwhile the trainer takes ``STEP_S`` a step, which is longer than the episodes of a batch take: a queue forms.

    window   at most so many groups, less one, overtake the oldest open one: nobody is starved, and who waits is seen
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from astraflow.algorithms.base import Select
from astraflow.algorithms.credit import GroupMean
from astraflow.algorithms.curate import Shuffled
from astraflow.algorithms.keep import DropZeroVariance
from astraflow.algorithms.pace import BoundedStaleness
from astraflow.algorithms.pipeline import Pipeline
from astraflow.algorithms.select import EarliestDeadline, Fifo
from astraflow.run.bench import _table
from astraflow.run.bench._cells import Cell, play_all, say
from astraflow.types import Lease

SEEDS = 3
STEPS = 80
GROUPS, SIZE = 4, 4
MAX_STALENESS = 4
WINDOW = 4 * GROUPS
MEDIAN_S = 2.0
SIGMA = math.log(8) / 2.326
STEP_S = 3.0
HEARD_S = 0.25
"""Ends are heard at multiples of it: several episodes share one transaction."""
LR = 5e-4
SUPERVISED = 100
EVALS = 8

ORDERS: dict[str, Select] = {
    "earliest deadline": EarliestDeadline(),
    "fifo": Fifo(),
    "earliest deadline, window": EarliestDeadline(window=WINDOW),
    "fifo, window": Fifo(window=WINDOW),
}


def episode_s(lease: Lease) -> float:
    """Seeded by the episode and its task: the same for every order, as long as they play the same."""
    by_task = random.Random(f"slow/{lease.task.key}").gauss(0.0, 1.0)
    own = random.Random(f"{lease.seed}").gauss(0.0, 1.0)
    seconds = MEDIAN_S * math.exp(SIGMA * math.sqrt(0.5) * (by_task + own))
    return math.ceil(seconds / HEARD_S) * HEARD_S


def is_slow(key: str) -> bool:
    """Of the slowest quarter of all tasks."""
    return random.Random(f"slow/{key}").gauss(0.0, 1.0) > 0.6745


def main(
    *, seeds: int = SEEDS, steps: int = STEPS, lr: float = LR, processes: int = 2, out: Path = Path("runs/bench-order")
) -> dict[str, Any]:
    began = time.monotonic()
    cells: list[Cell] = [
        {"bench": "order", "seed": seed, "order": name, "steps": steps, "lr": lr}
        for seed in range(seeds)
        for name in ORDERS
    ]
    played = play_all(__name__, cells, processes=processes, folder=out, say=say)
    result = {**table(played), "steps": steps, "lr": lr, "wall_s": round(time.monotonic() - began, 1)}
    _table.write(out, result, text(result))
    panels = {"by steps": curves(played, "versions"), "by time (s of the run's own)": curves(played, "times")}
    title = f"long-tailed episodes, mean of {seeds} seeds"
    _table.plot(out / "curve.png", panels, title=title, x_label="steps, seconds", y_label="accuracy")
    return result


def play(cell: Cell, folder: Path) -> dict[str, Any]:
    """One run, in this process."""
    from astraflow.run.bench._drive import played
    from astraflow.run.bench._middle import split

    tasks = split()
    found, common = played(
        cell,
        folder,
        supervised=SUPERVISED,
        evals=EVALS,
        pipeline=Pipeline(
            curate=Shuffled(tasks.train, group_size=SIZE, seed=cell["seed"]),
            pace=BoundedStaleness(),
            credit=GroupMean(std=True),
            keep=(DropZeroVariance(),),
            select=ORDERS[cell["order"]],
        ),
        groups_per_batch=GROUPS,
        max_staleness=MAX_STALENESS,
        held_out=tasks.held_out,
        episode_s=episode_s,
        step_s=STEP_S,
    )
    return {
        "points": [point.score for point in found.points],
        "versions": [point.version for point in found.points],
        "times": [point.at_s for point in found.points],
        "episodes": found.points[-1].episodes,
        "oldest_mean": sum(each.oldest for each in found.ages) / max(1, len(found.ages)),
        "slow_share": sum(is_slow(key) for key in found.trained) / max(1, len(found.trained)),
        "cancelled": found.cancelled,
        **common,
    }


# ── what they say together ──


def table(played: Sequence[tuple[Cell, Any]]) -> dict[str, Any]:
    """``equal_s``: accuracy when the fastest of all runs had ended."""
    budget = min(found["times"][-1] for _, found in played)
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(cell["order"] for cell, _ in played):
        own = [found for cell, found in played if cell["order"] == name]
        curve = [list(zip(found["versions"], found["points"], strict=True)) for found in own]
        by_time = [list(zip(found["times"], found["points"], strict=True)) for found in own]
        rows.append(
            {
                "order": name,
                "end": _table.spread([_table.last_mean(points, points[-1][0]) for points in curve]),
                "equal_s": _table.spread([_table.last_mean(points, budget) for points in by_time]),
                "time_s": _table.spread([found["times"][-1] for found in own]),
                "episodes": _table.spread([found["episodes"] for found in own]),
                "stale_groups": _table.spread([found["groups"].get("stale", 0) for found in own]),
                "stale_samples": _table.spread([found["masked"].get("stale", 0) for found in own]),
                "cancelled": _table.spread([found["cancelled"] for found in own]),
                "oldest": _table.spread([found["oldest_mean"] for found in own]),
                "slow_share": _table.spread([found["slow_share"] for found in own]),
                "ended": [found["ended"] for found in own],
            }
        )
    failures = [f"{row['order']}: {why}" for row in rows for why in row["ended"] if why]
    return {"rows": rows, "equal_time_s": budget, "failures": failures}


def curves(played: Sequence[tuple[Cell, Any]], along: str) -> dict[str, list[_table.Points]]:
    """Order → the curve of each seed."""
    series: dict[str, list[_table.Points]] = {}
    for cell, found in played:
        points = list(zip(found[along], found["points"], strict=True))
        series.setdefault(cell["order"], []).append(points)
    return series


def text(result: dict[str, Any]) -> str:
    head = ["order", "at the end", f"after {result['equal_time_s']:.0f} s", "seconds", "episodes"]
    rows = [
        [*head, "stale groups", "stale samples", "cancelled", "oldest of a batch", "from slow tasks", "ended early"]
    ]
    for row in result["rows"]:
        early = [why for why in row["ended"] if why]
        means = {name: row[name]["mean"] for name in row if isinstance(row[name], dict)}
        rows.append(
            [
                row["order"],
                _table.shown(row["end"]),
                _table.shown(row["equal_s"]),
                f"{means['time_s']:,.0f}",
                f"{means['episodes']:,.0f}",
                f"{means['stale_groups']:,.0f}",
                f"{means['stale_samples']:,.0f}",
                f"{means['cancelled']:,.0f}",
                f"{means['oldest']:.2f}",
                f"{means['slow_share']:.1%}",
                f"{len(early)} of {len(row['ended'])}",
            ]
        )
    said = f"{result['steps']} optimiser steps a run, lr {result['lr']:g}; slow tasks are a quarter of all"
    return "\n".join([_table.lines(rows), said, *result["failures"]])
