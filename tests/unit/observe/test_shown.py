"""The curve and the progress lines."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from astraflow.observe.curve import save_curve, text_curve
from astraflow.observe.progress import Progress, Snapshot, plain_line

LINES = {"reward": [(float(i), i / 10) for i in range(11)], "held-out": [(0.0, 0.0), (10.0, 1.0)]}


def test_text_curve_places_first_and_last_point() -> None:
    text = text_curve(LINES, width=20, height=6)
    rows = text.splitlines()
    assert rows[0].startswith("  1.00 ┤")
    assert rows[0].endswith("O")
    assert rows[5].startswith("  0.00 ┤O")
    assert [row.split() for row in rows[-2:]] == [["step", "·", "reward"], ["O", "held-out"]]
    assert all(len(row) <= 28 for row in rows)
    assert text_curve(LINES).splitlines()[-1].split() == ["step", "·", "reward", "O", "held-out"]


@pytest.mark.parametrize("count", [6, 8, 40])
def test_any_number_of_lines_is_drawn_named_and_told_apart(count: int) -> None:
    lines = {f"reward r{n}": [(float(x), float(n)) for x in range(60)] for n in range(count)}
    text = text_curve(lines, height=count)
    frame, named = text.split("└")
    legend = dict(re.findall(r"(\S) (reward r\d+)(?=   |\n|$)", named))
    assert list(legend.values()) == list(lines), "each has a mark that no other has"
    rows = [row.split("┤")[1] for row in frame.splitlines() if "┤" in row]
    assert [set(row) for row in rows] == [{mark, " "} for mark in reversed(legend)]
    assert all(len(row) <= 76 for row in text.splitlines())


def test_of_lines_that_lie_on_each_other_each_is_seen() -> None:
    same = [(float(x), 0.5) for x in range(20)]
    text = text_curve({f"r{n}": same for n in range(8)}, height=5)
    assert set("·O+x*#%@") <= set(text.split("└")[0])
    alone = text_curve({"a": [(0.0, 1.0)], "b": [(0.0, 1.0)]})
    assert "O" in alone and "· a   O b" in alone, "where there is one cell for two, the later one is seen"


@pytest.mark.parametrize("points", [[(3.0, 0.5)], [(0.0, 0.0), (1.0, 0.0)], [(0.0, -1.0), (1.0, -2.0)]])
def test_text_curve_of_little(points: list[tuple[float, float]]) -> None:
    assert "┤" in text_curve({"a": points})


def test_text_curve_of_nothing() -> None:
    assert text_curve({}) == "(no points yet)"
    assert text_curve({"a": []}) == "(no points yet)"


@pytest.mark.parametrize("lines", [LINES, {}, {"a": []}])
def test_png(tmp_path: Path, lines: dict[str, list[tuple[float, float]]]) -> None:
    path = tmp_path / "curve.png"
    save_curve(path, lines, title="t")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["curve.png"]


def snapshot(**changes: object) -> Snapshot:
    fields = {"run": "r", "elapsed_s": 81.2, "version": 12, "steps": 60, **changes}
    return Snapshot(**fields)  # type: ignore[arg-type]


def test_plain_line() -> None:
    full = snapshot(rewards={"main": 0.31}, accuracy=0.2, accuracy_version=8, staleness=1.0, tokens_per_s=410.4)
    assert plain_line(full) == "[  81 s] step 12/60  reward 0.31  held-out 0.20 (v8)  staleness 1.0  410 tokens/s"
    two = snapshot(rewards={"solver": 0.31, "verifier": 0.5})
    assert plain_line(two) == "[  81 s] step 12/60  reward solver 0.31 verifier 0.50"
    assert plain_line(snapshot()) == "[  81 s] step 12/60"


@pytest.mark.parametrize("live", [False, True])
def test_what_user_code_said_does_nothing_to_a_terminal(live: bool) -> None:
    nasty = "gone \x1b[31m\nstopped"
    out = io.StringIO()
    with Progress(out, live=live) as progress:
        progress.show(snapshot())
        progress.say(f"rollout-0 died: {nasty}")
        progress.show(snapshot(elapsed_s=200.0, parts={"rollout r": nasty}, note=nasty))
    assert "rollout-0 died: gone \\x1b[31m\n    | stopped\n" in out.getvalue()
    assert "gone \x1b" not in out.getvalue() and "\nstopped" not in out.getvalue()


def test_plain_output_prints_only_what_is_new() -> None:
    out = io.StringIO()
    with Progress(out) as progress:
        progress.show(snapshot())
        progress.show(snapshot(elapsed_s=82.0))
        progress.show(snapshot(version=13))
        progress.say("a line")
    assert out.getvalue().splitlines() == ["[  81 s] step 12/60", "[  81 s] step 13/60", "a line"]


def test_live_output_shows_what_each_part_waits_for() -> None:
    out = io.StringIO()
    with Progress(out, live=True) as progress:
        progress.show(snapshot(parts={"trainer main": "waits for a batch: 5/8 groups"}))
        progress.say("[not markup]")
    assert "waits for a batch: 5/8 groups" in out.getvalue()
    assert "[not markup]" in out.getvalue()


def test_a_quiet_while_says_what_everybody_waits_for() -> None:
    out = io.StringIO()
    parts = {"trainer main": "waits 60 s for a batch: 4/8 groups kept"}
    with Progress(out) as progress:
        for second in range(0, 71, 5):
            progress.show(snapshot(elapsed_s=float(second), version=0, parts=parts))
    line = "          trainer main: waits 60 s for a batch: 4/8 groups kept"
    shown = ["[   0 s] step 0/60", "[  30 s] step 0/60", line, "[  60 s] step 0/60", line]
    assert out.getvalue().splitlines() == shown


def test_an_evaluation_that_could_not_be_graded_is_no_plain_zero() -> None:
    held_out = plain_line(snapshot(accuracy=0.0, accuracy_version=0, coverage=0.25))
    assert held_out == "[  81 s] step 12/60  held-out 0.00 (v0, only 25% graded)"


def test_no_curve_has_a_negative_zero() -> None:
    assert "-0.00" not in text_curve({"a": [(0.0, -0.001), (1.0, 1.0)]}, height=4)
