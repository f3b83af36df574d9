"""What the three tables make of their cells, and that each command plays, prints and draws."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from astraflow.algorithms.base import Replay
from astraflow.algorithms.curate import Dots, Greso, Shuffled
from astraflow.algorithms.keep import DropZeroVariance
from astraflow.algorithms.keep_subset import MaxVariance, OfSubset
from astraflow.errors import ConfigError
from astraflow.run.bench import algorithms, lag, order
from astraflow.run.bench._cells import FILE
from astraflow.run.bench._middle import pool, split
from astraflow.run.cli import main
from astraflow.types import Lease

# ── lag ──


def lag_found(end: float, **changed: Any) -> dict[str, Any]:
    found = {
        "points": [[0, 0.2], [4, 0.3], [8, 0.4], [16, end]],
        "episodes": 100,
        "held_steps": 12,
        "lowest": 4,
        "highest": 4,
        "not_held": 0,
        "groups": {"trained": 32},
        "masked": {},
        "ended": "",
    }
    return {**found, **changed}


def test_a_row_of_lags_is_the_mean_of_its_seeds_and_says_what_was_not_held() -> None:
    cells = lag.cells(2, [4], ["grpo", "m2po"], 16, 1e-3)
    early = {"points": [[0, 0.2], [4, 0.1]], "ended": "Starved: no signal", "not_held": 2, "lowest": 3}
    results = [lag_found(0.6), lag_found(0.5), lag_found(0.8), lag_found(0.0, **early)]
    found = lag.table(list(zip(cells, results, strict=True)))
    grpo, m2po = found["rows"]
    assert (grpo["loss"], grpo["lag"], grpo["end"]["values"]) == ("grpo", 4, [0.6, 0.8])
    assert grpo["quarter"]["values"] == [0.3, 0.3]
    assert m2po["end"]["values"] == [0.5, 0.1], "what ended early keeps its last value"
    assert (m2po["held"], found["not_held"]) == ([(3, 4), (4, 4)], 2)
    assert found["failures"] == ["m2po lag 4: Starved: no signal"]
    shown = lag.text({**found, "steps": 16, "lr": 1e-3})
    assert "0.700 ± 0.141" in shown
    assert "1 of 2" in shown
    assert "3 to 4, 4" in shown
    assert lag.curves(list(zip(cells, results, strict=True)))["m2po"]["lag 4"][1] == [(0, 0.2), (4, 0.1)]


def test_what_there_is_when_time_is_over_is_a_whole_table_of_fewer_seeds() -> None:
    cells = lag.cells(3, lag.LAGS, lag.LOSSES, 1024, lag.LR)
    assert len(cells) == 45
    assert {cell["seed"] for cell in cells[:15]} == {0}
    assert {(cell["lag"], cell["loss"]) for cell in cells[:15]} == {(a, b) for a in lag.LAGS for b in lag.LOSSES}


@pytest.mark.parametrize(("asked", "words"), [({"steps": 15}, "steps >= 4 x"), ({"lags": [-1]}, "lags >= 0")])
def test_too_few_steps_to_hold_the_lag_are_refused(asked: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        lag.main(**{"lags": [4], "out": tmp_path, **asked})
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        lag.main(losses=["gropo"], out=tmp_path)
    with pytest.raises(ConfigError, match="seeds must be at least 1"):
        lag.main(seeds=0, out=tmp_path)


# ── algorithms ──


def test_each_algorithm_is_what_its_name_says() -> None:
    made = {name: choice.pipeline(pool().train, 0) for name, choice in algorithms.CHOICES.items()}
    curates = {name: type(each.curate) for name, each in made.items()}
    assert curates == {
        **dict.fromkeys(("vanilla", "ds", "pods", "replay"), Shuffled),
        **dict.fromkeys(("greso", "ds+replay+greso"), Greso),
        "dots": Dots,
    }
    keeps = {name: tuple(type(keep) for keep in each.keep) for name, each in made.items()}
    assert {name for name, each in keeps.items() if DropZeroVariance in each} == {"ds", "greso", "ds+replay+greso"}
    assert {name for name, each in keeps.items() if MaxVariance in each} == {"pods"}
    assert isinstance(made["pods"].credit, OfSubset)
    assert {name for name, each in made.items() if isinstance(each.select, Replay)} == {"replay", "ds+replay+greso"}


def algorithm_found(episodes: int, end: float, dropped: int = 0) -> dict[str, Any]:
    half = episodes // 2
    return {
        "points": [[0, 0.2], [half, 0.3], [episodes, end]],
        "versions": [0, 5, 10],
        "groups": {"trained": 10, "dropped/zero_variance": dropped},
        "ended": "",
    }


def test_algorithms_are_compared_when_as_many_episodes_were_played() -> None:
    cells = [{"algorithm": name, "seed": 0} for name in ("vanilla", "ds")]
    results = [algorithm_found(100, 0.5), algorithm_found(300, 0.9, dropped=30)]
    found = algorithms.table(list(zip(cells, results, strict=True)))
    vanilla, ds = found["rows"]
    assert found["equal_episodes"] == 100
    assert (vanilla["equal"]["mean"], vanilla["end"]["mean"]) == (0.5, 0.5)
    assert (ds["equal"]["mean"], ds["end"]["mean"], ds["dropped"]["mean"]) == (0.2, 0.9, 0.75)
    shown = algorithms.text({**found, "steps": 10, "lr": 1e-3})
    assert "at 100 episodes" in shown
    assert "75.0%" in shown


# ── order ──


def test_times_are_long_tailed_seeded_and_slow_tasks_stay_slow() -> None:
    train = split().train
    keys = [train.task(n) for n in range(train.size or 0)]
    drawn = sorted(
        order.episode_s(Lease(group=n, index=0, attempt=1, task=task, seed=1000 * k + n))
        for n, task in enumerate(keys)
        for k in range(8)
    )
    ratio = drawn[round(0.99 * len(drawn))] / drawn[len(drawn) // 2]
    assert 6 < ratio < 10, "p99 / p50 is about 8"
    assert drawn[len(drawn) // 2] == pytest.approx(order.MEDIAN_S, rel=0.15)
    lease = Lease(group=1, index=0, attempt=1, task=keys[0], seed=5)
    assert order.episode_s(lease) == order.episode_s(lease)
    assert 0.18 < statistics.fmean(order.is_slow(task.key) for task in keys) < 0.32


def test_orders_are_compared_by_time_and_tell_what_was_lost() -> None:
    base = {"episodes": 10, "oldest_mean": 1.5, "slow_share": 0.1, "cancelled": 3, "masked": {"stale": 2}, "ended": ""}
    runs = [
        {**base, "points": [0.1, 0.5], "versions": [0, 8], "times": [0.0, 80.0], "groups": {"stale": 4, "trained": 9}},
        {**base, "points": [0.1, 0.6], "versions": [0, 8], "times": [0.0, 90.0], "groups": {"trained": 9}},
    ]
    cells = [{"order": name, "seed": 0} for name in ("fifo", "earliest deadline")]
    found = order.table(list(zip(cells, runs, strict=True)))
    fifo, deadline = found["rows"]
    assert found["equal_time_s"] == 80.0
    assert (fifo["stale_groups"]["mean"], deadline["stale_groups"]["mean"]) == (4, 0)
    assert (deadline["end"]["mean"], deadline["equal_s"]["mean"]) == (0.6, 0.1)
    assert "after 80 s" in order.text({**found, "steps": 8, "lr": 1e-3})


# ── the commands ──

COMMANDS = {
    "algorithms": ["--seeds", "1", "--steps", "2"],
    "order": ["--seeds", "1", "--steps", "3"],
    "lag": ["--seeds", "1", "--lags", "1", "--losses", "grpo", "--losses", "m2po", "--steps", "4"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_plays_prints_and_draws(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", name, *COMMANDS[name], "--processes", "1", "--json", "--out", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["failures"] == []
    assert printed["rows"] == json.loads((tmp_path / "table.json").read_text())["rows"]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "table.txt").read_text().splitlines()) > len(printed["rows"])
    assert len((tmp_path / FILE).read_text().splitlines()) == {"algorithms": 7, "order": 4, "lag": 2}[name]
