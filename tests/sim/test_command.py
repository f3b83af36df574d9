"""``make sim``: how many seeds, what it says on the way, and what it says of a seed that breaks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from astraflow.testing.simulator import __main__ as command
from astraflow.testing.simulator import many, simulate

MAKEFILE = Path(__file__).parents[2] / "Makefile"


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    import logging

    yield
    logging.disable(logging.NOTSET)


def test_make_sim_is_ten_thousand_seeds_unless_told() -> None:
    text = MAKEFILE.read_text()
    assert re.search(r"^SEEDS \?= 10000$", text, re.MULTILINE)
    assert re.search(r"^sim: .*\n\t.*simulator --seeds \$\(SEEDS\) --jobs \$\(JOBS\)$", text, re.MULTILINE)
    assert 100 <= command.PROGRESS_SEEDS <= 900


def test_progress_on_the_way_and_counts_of_faults_and_edges_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PROGRESS_SEEDS", 1)
    assert command.main(["--seeds", "2", "--first", "10", "--jobs", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines if " seeds, 0 failed, " in line] == ["1 seeds", "2 seeds"]
    assert lines[-1].startswith("2 seeds, 0 failed [], ")
    outcomes = [simulate(seed) for seed in range(10, 12)]
    for fault in {name for outcome in outcomes for name in outcome.faults}:
        total = sum(outcome.faults[fault] for outcome in outcomes)
        assert f"{total:10d}  {fault}" in lines
    leased = sum(outcome.edges["episodes", "pending", "leased"] for outcome in outcomes)
    assert leased and f"{leased:10d}  episodes: pending -> leased" in lines


def test_several_processes_tell_the_same_in_the_same_order(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three seeds are given to two processes one by one; only the seconds differ."""
    monkeypatch.setattr(many, "SEEDS_AT_A_TIME", 1)
    reports = []
    for jobs in ("1", "2"):
        assert command.main(["--seeds", "3", "--first", "20", "--jobs", jobs]) == 0
        reports.append(re.sub(r"\d+ s$", "", capsys.readouterr().out, flags=re.MULTILINE))
    assert reports[0] == reports[1] and reports[0].startswith(" ")


def test_outcomes_come_in_the_order_of_the_seeds_whoever_is_done_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "SEEDS_AT_A_TIME", 2)
    seeds = range(40, 51)
    assert [seed for seed, *_ in many.run_all(seeds, jobs=2, run=named)] == list(seeds)
    assert [broken for *_, broken in many.run_all(seeds, jobs=1, run=named)] == [f"seed {seed}" for seed in seeds]


def named(seed: int) -> many.Seen:
    return seed, Counter(), {}, f"seed {seed}"


def test_a_broken_seed_is_named_counted_and_ends_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaking(seed: int) -> Any:
        if seed == 2:
            raise AssertionError("an episode was lost")
        return simulate(seed)

    monkeypatch.setattr(many, "simulate", breaking)
    monkeypatch.setattr(command, "PROGRESS_SEEDS", 2)
    assert command.main(["--seeds", "2", "--first", "1", "--jobs", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "seed 2 FAILED: AssertionError: an episode was lost" in lines
    assert any(line.startswith("2 seeds, 1 failed, ") for line in lines)  # a broken seed is progress too
    assert lines[-1].startswith("2 seeds, 1 failed [2], ")


@pytest.mark.slow
def test_a_few_hundred_more_histories(capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the ones of ``test_simulator.py``."""
    code = command.main(["--seeds", "200", "--first", "1000"])
    said = capsys.readouterr().out
    assert code == 0, said
    assert "200 seeds, 0 failed []" in said.splitlines()[-1]
