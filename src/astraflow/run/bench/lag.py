"""The lag-quality curve: the same run with data that is always L versions old, by loss.

``HeldStaleness`` makes dataflow a delay line: every version samples one batch, every step trains what version v - L
sampled; the first L steps train what version 0 did, while the lag grows. All cells start from the same supervised
weights of their seed and do equally many optimiser steps in all, at least 4 x the longest lag, so that at least 3 x L
of them are at lag L. The ages are read back from the ledger; one that is not exactly L is counted in ``not_held``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from astraflow.algorithms.credit import GroupMean
from astraflow.algorithms.curate import Shuffled
from astraflow.algorithms.keep import DropZeroVariance
from astraflow.algorithms.pace_held import HeldStaleness
from astraflow.algorithms.pipeline import Pipeline
from astraflow.algorithms.select import EarliestDeadline
from astraflow.errors import ConfigError
from astraflow.loss_options import spec_of
from astraflow.run.bench import _table
from astraflow.run.bench._cells import Cell, play_all, say

LAGS = (0, 4, 16, 64, 256)
LOSSES = ("grpo", "decoupled_ppo", "m2po")
QUICK_LAGS = (0, 4, 16)
SEEDS = 3
GROUPS, SIZE = 2, 8
LR = 3e-4
SUPERVISED = 100
EVALS = 16
"""Evaluations of a run, beside that of the start."""
WRONG = ("not_held",)
"""Steps past the first L whose data was not exactly L versions old: with any, the command's exit code is 1."""


def main(
    *,
    seeds: int = SEEDS,
    lags: Sequence[int] = (),
    losses: Sequence[str] = (),
    steps: int | None = None,
    lr: float = LR,
    quick: bool = False,
    processes: int = 2,
    out: Path = Path("runs/bench-lag"),
) -> dict[str, Any]:
    lags = sorted(set(lags or (QUICK_LAGS if quick else LAGS)))
    losses = tuple(losses) or LOSSES
    for loss in losses:
        spec_of(loss)
    least = max(1, 4 * max(lags))
    steps = least if steps is None else steps
    if min(lags) < 0 or steps < least:
        raise ConfigError(f"bench lag: lags >= 0 and steps >= 4 x the longest, found lags {lags}, steps {steps}")
    began = time.monotonic()
    played = play_all(__name__, cells(seeds, lags, losses, steps, lr), processes=processes, folder=out, say=say)
    result = {**table(played), "steps": steps, "lr": lr, "wall_s": round(time.monotonic() - began, 1)}
    _table.write(out, result, text(result))
    title = f"held-out accuracy with the staleness held, mean of {seeds} seeds"
    _table.plot(out / "curve.png", curves(played), title=title, x_label="optimiser step", y_label="accuracy")
    return result


def cells(seeds: int, lags: Sequence[int], losses: Sequence[str], steps: int, lr: float) -> list[Cell]:
    """Seed by seed, so that what is there when time is over is a whole table of fewer seeds."""
    return [
        {"bench": "lag", "seed": seed, "lag": lag, "loss": loss, "steps": steps, "lr": lr}
        for seed in range(seeds)
        for lag in lags
        for loss in losses
    ]


def play(cell: Cell, folder: Path) -> dict[str, Any]:
    """One run, in this process."""
    from astraflow.run.bench._drive import played
    from astraflow.run.bench._middle import split

    tasks = split()
    lag = cell["lag"]
    found, common = played(
        cell,
        folder,
        supervised=SUPERVISED,
        evals=EVALS,
        loss=cell["loss"],
        pipeline=Pipeline(
            curate=Shuffled(tasks.train, group_size=SIZE, seed=cell["seed"]),
            pace=HeldStaleness(lag=lag),
            credit=GroupMean(std=True),
            keep=(DropZeroVariance(),),
            select=EarliestDeadline(),
        ),
        groups_per_batch=GROUPS,
        max_staleness=lag,
        held_out=tasks.held_out,
    )
    held = [each for each in found.ages if each.version >= lag]
    return {
        "points": [[point.version, point.score] for point in found.points],
        "episodes": found.points[-1].episodes,
        "held_steps": len(held),
        "lowest": min((each.youngest for each in held), default=None),
        "highest": max((each.oldest for each in held), default=None),
        "not_held": sum(not each.youngest == each.oldest == lag for each in held),
        **common,
    }


# ── what they say together ──


def table(played: Sequence[tuple[Cell, Any]]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for loss, lag in dict.fromkeys((cell["loss"], cell["lag"]) for cell, _ in played):
        own = [(cell, found) for cell, found in played if (cell["loss"], cell["lag"]) == (loss, lag)]
        steps = own[0][0]["steps"]
        runs = [found["points"] for _, found in own]
        rows.append(
            {
                "loss": loss,
                "lag": lag,
                "start": _table.spread([run[0][1] for run in runs]),
                "quarter": _table.spread([_table.last_mean(run, steps / 4) for run in runs]),
                "half": _table.spread([_table.last_mean(run, steps / 2) for run in runs]),
                "end": _table.spread([_table.last_mean(run, steps) for run in runs]),
                "held": sorted({(found["lowest"], found["highest"]) for _, found in own}, key=repr),
                "held_steps": [found["held_steps"] for _, found in own],
                "not_held": sum(found["not_held"] for _, found in own),
                "episodes": _table.spread([found["episodes"] for _, found in own]),
                "ended": [found["ended"] for _, found in own],
            }
        )
    return {
        "rows": rows,
        "not_held": sum(row["not_held"] for row in rows),
        "failures": [f"{row['loss']} lag {row['lag']}: {why}" for row in rows for why in row["ended"] if why],
    }


def curves(played: Sequence[tuple[Cell, Any]]) -> dict[str, dict[str, list[_table.Points]]]:
    """Loss → lag → the curve of each seed."""
    panels: dict[str, dict[str, list[_table.Points]]] = {}
    for cell, found in played:
        series = panels.setdefault(cell["loss"], {}).setdefault(f"lag {cell['lag']}", [])
        series.append([(x, y) for x, y in found["points"]])
    return panels


def text(result: dict[str, Any]) -> str:
    rows = [["loss", "lag", "start", "at 1/4", "at 1/2", "at the end", "ages when held", "episodes", "ended early"]]
    for row in result["rows"]:
        ages = ", ".join(f"{low}" if low == high else f"{low} to {high}" for low, high in row["held"])
        early = [why for why in row["ended"] if why]
        accuracy = [_table.shown(row[name]) for name in ("start", "quarter", "half", "end")]
        episodes = f"{row['episodes']['mean']:,.0f}"
        rows.append([row["loss"], str(row["lag"]), *accuracy, ages, episodes, f"{len(early)} of {len(row['ended'])}"])
    said = [f"{result['steps']} optimiser steps a run, lr {result['lr']:g}; not held: {result['not_held']} steps"]
    return "\n".join([_table.lines(rows), *said, *result["failures"]])
