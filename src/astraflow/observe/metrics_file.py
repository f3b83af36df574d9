"""``metrics.jsonl``: one writer, append-only, each kind of point on its own x-axis.

{"kind": "step",   "policy": "main", "step": 7, "at_s": 81.2, "metrics": {...}}
{"kind": "eval",   "policy": "main", "policy_version": 5, "digest": "...", "dataset": "...", ...}
{"kind": "resume", "policy": "main", "after_step": 6}        steps above 6 written before this line are superseded
"""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from astraflow.errors import ConfigError


class MetricsFile:
    """Points may come in any order: nothing is dropped because a later one was already there (F108)."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("a", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise ConfigError(f"another process writes {path}; stop it, or use another run folder") from error
        self._end_torn_line()

    def step(self, policy: str, step: int, metrics: Mapping[str, float], *, at_s: float, **about: int | str) -> None:
        point = {"kind": "step", "policy": policy, "step": step, "at_s": at_s, **about}
        self._write({**point, "metrics": dict(metrics)})

    def eval(self, policy: str, version: int, metrics: Mapping[str, float], *, at_s: float, **about: str) -> None:
        """Under the version that was evaluated, however late it comes (F71)."""
        point = {"kind": "eval", "policy": policy, "policy_version": version, "at_s": at_s, **about}
        self._write({**point, "metrics": dict(metrics)})

    def resume(self, policy: str, after_step: int) -> None:
        self._write({"kind": "resume", "policy": policy, "after_step": after_step})

    def close(self) -> None:
        self._file.close()

    def _write(self, point: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(_finite(point), allow_nan=False) + "\n")
        self._file.flush()

    def _end_torn_line(self) -> None:
        """A writer that died in the middle of a line must not spoil the next one."""
        text = self._path.read_bytes()
        if text and not text.endswith(b"\n"):
            self._file.write("\n")


def _finite(value: Any) -> Any:
    """JSON has no NaN: a metric without a number is null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One line as read back."""

    kind: str
    policy: str
    x: int
    """Step of a step point, version of an eval point."""
    at_s: float
    metrics: dict[str, float | None]
    about: dict[str, Any] = field(default_factory=dict)
    superseded: bool = False
    """Written before the run was resumed at an earlier step."""


def read_points(path: Path) -> list[Point]:
    """In the order of the file; torn lines are left out."""
    points: list[Point] = []
    if not path.exists():
        return points
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # torn by a crash
        if row["kind"] == "resume":
            points = [_superseded(p, row["policy"], row["after_step"]) for p in points]
            continue
        axis = "step" if row["kind"] == "step" else "policy_version"
        about = {k: v for k, v in row.items() if k not in ("kind", "policy", axis, "at_s", "metrics")}
        points.append(
            Point(
                kind=row["kind"],
                policy=row["policy"],
                x=row[axis],
                at_s=row.get("at_s", 0.0),
                metrics=row.get("metrics", {}),
                about=about,
            )
        )
    return points


def _superseded(point: Point, policy: str, after: int) -> Point:
    if point.policy != policy or point.x <= after or point.superseded:
        return point
    return Point(
        kind=point.kind,
        policy=point.policy,
        x=point.x,
        at_s=point.at_s,
        metrics=point.metrics,
        about=point.about,
        superseded=True,
    )


def series(points: Iterable[Point], kind: str, name: str, policy: str | None = None) -> list[tuple[int, float]]:
    """(x, value) of the surviving history by x; of several values at one x the last written."""
    found: dict[int, float] = {}
    for point in points:
        value = point.metrics.get(name)
        if point.kind == kind and not point.superseded and value is not None and policy in (None, point.policy):
            found[point.x] = value
    return sorted(found.items())


def best_eval(points: Iterable[Point], name: str = "score") -> Point | None:
    """Highest score; ties to the earlier version. Order of arrival does not matter."""
    scored = [(p.metrics.get(name), p) for p in points if p.kind == "eval" and not p.superseded]
    ranked = [(value, -p.x, p) for value, p in scored if value is not None]
    return max(ranked, key=lambda item: item[:2])[2] if ranked else None
