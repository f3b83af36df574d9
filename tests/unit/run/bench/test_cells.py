"""Cells in worker processes: each is played once, results go with their cell, a death is named and loses nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from astraflow.errors import RunFailed
from astraflow.run.bench._cells import FILE, play_all, read_known

MODULE = "tests.unit.run.bench.counting"


def played(tmp_path: Path, cells: list[dict[str, Any]], processes: int = 2) -> tuple[list[Any], list[str]]:
    said: list[str] = []
    return play_all(MODULE, cells, processes=processes, folder=tmp_path, say=said.append), said


def test_each_result_is_its_cells_in_the_order_asked_and_no_cell_is_played_twice(tmp_path: Path) -> None:
    cells = [{"n": n} for n in range(4)]
    found, said = played(tmp_path, cells)
    assert [(cell["n"], result["twice"]) for cell, result in found] == [(n, 2 * n) for n in range(4)]
    assert {result["folders"] for _, result in found} == {1}, "a cell's own folder goes with it"
    assert len(said) == 4
    again, said = played(tmp_path, [{"n": 9}, *reversed(cells)])
    assert [result["twice"] for _, result in again] == [18, 6, 4, 2, 0]
    assert len(said) == 1, "only the new one"


def test_another_setting_is_another_cell_and_a_line_that_was_cut_off_is_played_again(tmp_path: Path) -> None:
    lines = [json.dumps({"cell": {"n": n, "lr": 0.1}, "found": {"twice": -1}}) for n in (1, 2)]
    (tmp_path / FILE).write_text(lines[0] + "\n" + lines[1][:-5] + "\n")
    assert len(read_known(tmp_path / FILE)) == 1
    found, _ = played(tmp_path, [{"n": 1, "lr": 0.1}, {"lr": 0.1, "n": 2}, {"n": 1, "lr": 0.2}], processes=1)
    assert [result["twice"] for _, result in found] == [-1, 4, 2]


def test_a_worker_that_dies_is_named_with_its_cell_and_what_was_finished_stays(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r'worker of cell {"dies": true, "n": 2} died'):
        played(tmp_path, [{"n": 1}, {"n": 2, "dies": True}, {"n": 3}], processes=1)
    assert [entry["twice"] for entry in read_known(tmp_path / FILE).values()] == [2]


def test_a_worker_ends_with_whoever_asked_also_in_the_middle_of_a_cell(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "astraflow.run.bench._cells", MODULE]
    pipe = subprocess.PIPE
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, text=True) as worker:
        assert worker.stdin is not None
        assert worker.stderr is not None
        worker.stdin.write('{"n": 1, "waits": true}\n')
        worker.stdin.flush()
        assert worker.stderr.readline() == "waits\n", "it plays"
        worker.stdin.close()
        assert worker.wait(60) == 0
    assert not list(tmp_path.iterdir()), "nothing is left behind"
