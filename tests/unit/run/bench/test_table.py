"""Figures of several seeds: what a row says is what the seeds gave, and a run that ended early is not made better."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from astraflow.run.bench import _table

CURVE = [(0.0, 0.1), (10.0, 0.3), (20.0, 0.5), (40.0, 0.9)]


def test_spread_is_the_sample_deviation_and_none_of_one() -> None:
    found = _table.spread([0.2, 0.4, 0.6])
    assert found["mean"] == pytest.approx(0.4)
    assert found["deviation"] == pytest.approx(0.2), "n - 1"
    assert found["values"] == [0.2, 0.4, 0.6]
    assert _table.spread([0.5])["deviation"] is None
    assert _table.shown(found) == "0.400 ± 0.200"
    assert _table.shown(_table.spread([0.5])) == "0.500"


@pytest.mark.parametrize(("x", "value"), [(-1, 0.1), (0, 0.1), (9.9, 0.1), (10, 0.3), (39, 0.5), (1000, 0.9)])
def test_between_two_points_the_earlier_one_counts(x: float, value: float) -> None:
    assert _table.at(CURVE, x) == value


def test_the_last_mean_is_of_the_end_of_the_run_and_nothing_beyond_it() -> None:
    assert _table.last_mean(CURVE, 40) == 0.9
    assert _table.last_mean(CURVE, 40, share=0.5) == pytest.approx(0.7)
    assert _table.last_mean(CURVE, 20, share=0.5) == pytest.approx(0.4), "what came later does not count"
    assert _table.last_mean(CURVE, 15) == 0.3, "no point in the share: the one before"
    assert _table.last_mean(CURVE, 80, share=0.9) == 0.9, "it ended early: its last value, for nothing changes after"


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert _table.lines([["a", "bb"], ["long", "c"]]).splitlines() == ["a     bb", "--------", "long  c"]


def test_files_are_complete_and_the_plot_is_a_picture(tmp_path: Path) -> None:
    _table.write(tmp_path / "out", {"rows": [1]}, "text")
    assert json.loads((tmp_path / "out" / "table.json").read_text()) == {"rows": [1]}
    assert (tmp_path / "out" / "table.txt").read_text() == "text\n"
    panels = {"one": {"a": [CURVE, CURVE[:2]], "empty": []}, "two": {"b": [CURVE]}}
    _table.plot(tmp_path / "out" / "curve.png", panels, title="t", x_label="x", y_label="y")
    assert (tmp_path / "out" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == ["curve.png", "table.json", "table.txt"]
