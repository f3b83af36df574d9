"""The learning curve: a few lines of text for the terminal, and a PNG for the run folder."""

from __future__ import annotations

import itertools
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from astraflow.disk import absent_if_raises, writing

Points = Sequence[tuple[float, float]]
"""(x, y) by x."""
Cell = tuple[int, int]
"""(row, column)"""
MARKS = "·O+x*#%@&=~" + "".join(sorted({*string.ascii_letters, *string.digits} - set("OxoX0")))
STYLES = ("-", "--", ":", "-.")
"""Colours come round after ten lines."""


def text_curve(lines: dict[str, Points], *, width: int = 68, height: int = 12, x_label: str = "step") -> str:
    """Several series in one frame, each with a mark of its own while there are marks; no series without points."""
    shown = {name: points for name, points in lines.items() if points}
    if not shown:
        return "(no points yet)"
    xs = [x for points in shown.values() for x, _ in points]
    ys = [y for points in shown.values() for _, y in points]
    left, right = min(xs), max(xs)
    low, high = min(0.0, *ys), max(ys)
    high = high if high > low else low + 1.0
    cells: dict[str, list[Cell]] = {name: [] for name in shown}
    for name, points in shown.items():
        for x, y in points:
            column = round((x - left) / ((right - left) or 1) * (width - 1))
            cells[name].append((round((high - y) / (high - low) * (height - 1)), column))
    marks = dict(zip(shown, itertools.cycle(MARKS), strict=False))
    owners = _owners(cells)
    grid = [[marks.get(owners.get((row, column), ""), " ") for column in range(width)] for row in range(height)]
    body = [
        f"{round(high - (high - low) * row / (height - 1), 2) + 0.0:6.2f} ┤{''.join(each).rstrip()}"
        for row, each in enumerate(grid)
    ]
    axis = " " * 7 + "└" + "─" * width
    ends = " " * 8 + f"{left:g}".ljust(width - len(f"{right:g}")) + f"{right:g}"
    legend = _legend([f"{mark} {name}" for name, mark in marks.items()], width - len(x_label) - 4)
    heads = itertools.chain([f"{x_label}    "], itertools.repeat(" " * (len(x_label) + 4)))
    return "\n".join([*body, axis, ends, *(" " * 8 + head + line for head, line in zip(heads, legend, strict=False))])


def _owners(cells: Mapping[str, Sequence[Cell]]) -> dict[Cell, str]:
    """Whose mark each cell shows: the last one's, but nobody is hidden who can have a cell of one that has several."""
    owners = {cell: name for name, own in cells.items() for cell in own}
    visible = Counter(owners.values())
    for name, own in cells.items():
        if not visible[name]:
            cell = max(own, key=lambda each: visible[owners[each]])
            if visible[owners[cell]] > 1:
                visible[owners[cell]] -= 1
                owners[cell], visible[name] = name, 1
    return owners


def _legend(entries: Sequence[str], width: int) -> list[str]:
    """As many on a line as fit."""
    lines: list[str] = []
    for entry in entries:
        if lines and len(lines[-1]) + 3 + len(entry) <= width:
            lines[-1] += f"   {entry}"
        else:
            lines.append(entry)
    return lines


def save_curve(path: Path, lines: dict[str, Points], *, title: str, x_label: str = "step") -> None:
    """PNG, complete or absent."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (name, points) in enumerate(each for each in lines.items() if each[1]):
        xs, ys = zip(*points, strict=True)
        few = len(points) < 30
        style = STYLES[number // 10 % len(STYLES)]
        axes.plot(xs, ys, style, marker="o" if few else None, linewidth=2.5 if few else 1.2, label=name)
    axes.set_xlabel(x_label)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    if axes.has_data():
        axes.legend(loc="lower right")
    partial = path.with_name(f".{path.name}.part")
    with writing(path), absent_if_raises(partial):
        figure.savefig(partial, format="png", bbox_inches="tight")
        partial.replace(path)
