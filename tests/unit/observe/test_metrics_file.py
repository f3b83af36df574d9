"""metrics.jsonl: nothing is dropped (F108), evaluations belong to their version (F71), one writer, torn lines."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from astraflow.errors import ConfigError
from astraflow.observe.metrics_file import MetricsFile, best_eval, read_points, series


def test_f108_points_out_of_order_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.step("main", 10, {"reward": 0.5}, at_s=1.0)
    file.eval("main", 8, {"score": 0.4}, at_s=2.0, digest="d8")
    file.step("main", 10, {"loss": 0.1}, at_s=3.0)
    file.resume("main", 6)
    file.step("main", 7, {"reward": 0.6}, at_s=4.0)
    file.close()
    points = read_points(path)
    assert [(p.kind, p.x, p.superseded) for p in points] == [
        ("step", 10, True),
        ("eval", 8, True),
        ("step", 10, True),
        ("step", 7, False),
    ]
    assert json.loads(path.read_text().splitlines()[1])["policy_version"] == 8
    assert "step" not in json.loads(path.read_text().splitlines()[1])


def test_f108_after_a_resume_the_old_steps_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in range(1, 11):
        file.step("main", step, {"reward": 0.1 * step}, at_s=step)
    file.step("other", 10, {"reward": 9.0}, at_s=10)
    file.resume("main", 6)
    file.step("main", 7, {"reward": 7.0}, at_s=11)
    file.close()
    points = read_points(path)
    assert series(points, "step", "reward", "main") == [
        *((step, pytest.approx(0.1 * step)) for step in range(1, 7)),
        (7, 7.0),
    ]
    assert series(points, "step", "reward", "other") == [(10, 9.0)]


def test_f108_one_writer(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(ConfigError, match="another process writes"):
        MetricsFile(tmp_path / "metrics.jsonl")
    file.close()
    MetricsFile(tmp_path / "metrics.jsonl").close()


def test_f71_an_evaluation_belongs_to_the_version_that_was_evaluated(tmp_path: Path) -> None:
    """The one of v10 ends when the trainer is at 13 and after that of v12."""
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.step("main", 13, {"reward": 0.5}, at_s=1.0)
    file.eval("main", 12, {"score": 0.6}, at_s=2.0, digest="d12")
    file.eval("main", 10, {"score": 0.8}, at_s=3.0, digest="d10")
    file.close()
    points = read_points(path)
    assert series(points, "eval", "score") == [(10, 0.8), (12, 0.6)]
    best = best_eval(points)
    assert best is not None
    assert (best.x, best.about["digest"]) == (10, "d10")


def test_f71_ties_go_to_the_earlier_version(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.eval("main", 12, {"score": 0.8}, at_s=2.0)
    file.eval("main", 10, {"score": 0.8}, at_s=3.0)
    file.eval("main", 11, {"coverage": 1.0}, at_s=3.0)
    file.close()
    best = best_eval(read_points(path))
    assert best is not None
    assert best.x == 10
    assert best_eval([]) is None


def test_a_torn_line_is_left_out_and_spoils_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.step("main", 1, {"reward": 0.5}, at_s=1.0)
    file.close()
    with path.open("a") as torn:
        torn.write('{"kind": "step", "pol')
    file = MetricsFile(path)
    file.step("main", 2, {"reward": 0.6}, at_s=2.0)
    file.close()
    assert series(read_points(path), "step", "reward") == [(1, 0.5), (2, 0.6)]


def test_a_number_that_json_does_not_have_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.step("main", 1, {"a": math.nan, "b": math.inf, "c": 1.0}, at_s=1.0)
    file.close()
    assert json.loads(path.read_text())["metrics"] == {"a": None, "b": None, "c": 1.0}
    assert series(read_points(path), "step", "a") == []


def test_no_file_is_no_points(tmp_path: Path) -> None:
    assert read_points(tmp_path / "none.jsonl") == []
