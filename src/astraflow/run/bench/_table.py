"""Figures of several seeds: mean and spread, lines of a table, a plot with a band. Pure but for the files it writes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Points = Sequence[tuple[float, float]]
"""(x, y) by x."""


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, sample deviation (None of one value) and the values themselves."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "deviation": deviation, "values": list(values)}


def shown(found: Mapping[str, Any] | None) -> str:
    """``0.871 ± 0.020``, in short."""
    if found is None:
        return "-"
    deviation = found["deviation"]
    return f"{found['mean']:.3f}" + ("" if deviation is None else f" ± {deviation:.3f}")


def at(points: Points, x: float) -> float:
    """The value of the last point at or before ``x``; of the first where there is none."""
    before = [value for place, value in points if place <= x]
    return before[-1] if before else points[0][1]


def last_mean(points: Points, end: float, share: float = 0.125) -> float:
    """Mean of the points in the last ``share`` of [0, ``end``]. A run that ended early keeps its last value."""
    late = [value for place, value in points if end * (1 - share) <= place <= end]
    return statistics.fmean(late) if late and points[-1][0] >= end else at(points, end)


def lines(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    made = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([made[0], "-" * (sum(widths) + 2 * len(widths) - 2), *made[1:]])


def write(folder: Path, result: Mapping[str, Any], text: str) -> None:
    """``table.json`` and ``table.txt``, each complete or absent."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, body in (("table.json", json.dumps(result, indent=1)), ("table.txt", text)):
        partial = folder / f".{name}.part"
        partial.write_text(f"{body}\n", encoding="utf-8")
        partial.replace(folder / name)


def plot(
    path: Path, panels: Mapping[str, Mapping[str, Sequence[Points]]], *, title: str, x_label: str, y_label: str
) -> None:
    """PNG: a panel each; in it a line a name, the mean of its seeds, and a band from the lowest to the highest."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(panels), 4.2), dpi=110)
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (name, series) in zip(axes, panels.items(), strict=True):
        for label, runs in series.items():
            if not runs:
                continue
            xs = sorted({x for run in runs for x, _ in run})
            ys = [[at(run, x) for run in runs] for x in xs]
            (line,) = axis.plot(xs, [statistics.fmean(each) for each in ys], label=label, linewidth=1.6)
            axis.fill_between(xs, [min(y) for y in ys], [max(y) for y in ys], color=line.get_color(), alpha=0.12)
        axis.set_title(name)
        axis.set_xlabel(x_label)
        axis.grid(alpha=0.3)
        if axis.has_data():
            axis.legend(fontsize="small")
    axes[0].set_ylabel(y_label)
    axes[0].set_ylim(bottom=0.0)
    figure.suptitle(title)
    partial = path.with_name(f".{path.name}.part")
    figure.savefig(partial, format="png", bbox_inches="tight")
    partial.replace(path)
