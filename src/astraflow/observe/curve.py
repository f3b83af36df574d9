"""The learning curve: a few lines of text for the terminal, and a PNG for the run folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from astraflow.disk import absent_if_raises, writing

Points = Sequence[tuple[float, float]]
"""(x, y) by x."""


def text_curve(lines: dict[str, Points], *, width: int = 68, height: int = 12, x_label: str = "step") -> str:
    """Several series in one frame, each with a mark of its own; no series without points."""
    shown = {name: points for name, points in lines.items() if points}
    if not shown:
        return "(no points yet)"
    xs = [x for points in shown.values() for x, _ in points]
    ys = [y for points in shown.values() for _, y in points]
    left, right = min(xs), max(xs)
    low, high = min(0.0, *ys), max(ys)
    high = high if high > low else low + 1.0
    grid = [[" "] * width for _ in range(height)]
    marks = "·O+x*"
    for mark, points in zip(marks, shown.values(), strict=False):
        for x, y in points:
            column = round((x - left) / ((right - left) or 1) * (width - 1))
            row = round((high - y) / (high - low) * (height - 1))
            grid[row][column] = mark
    body = [
        f"{round(high - (high - low) * row / (height - 1), 2) + 0.0:6.2f} ┤{''.join(cells).rstrip()}"
        for row, cells in enumerate(grid)
    ]
    axis = " " * 7 + "└" + "─" * width
    ends = " " * 8 + f"{left:g}".ljust(width - len(f"{right:g}")) + f"{right:g}"
    legend = " " * 8 + f"{x_label}    " + "   ".join(f"{m} {n}" for m, n in zip(marks, shown, strict=False))
    return "\n".join([*body, axis, ends, legend])


def save_curve(path: Path, lines: dict[str, Points], *, title: str, x_label: str = "step") -> None:
    """PNG, complete or absent."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in lines.items():
        if points:
            xs, ys = zip(*points, strict=True)
            few = len(points) < 30
            axes.plot(xs, ys, marker="o" if few else None, linewidth=2.5 if few else 1.2, label=name)
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
