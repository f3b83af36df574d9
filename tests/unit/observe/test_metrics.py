"""Means merge by (sum, count) (F106); every series exists at zero; Prometheus text is exact."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from astraflow.errors import ConfigError
from astraflow.observe.metrics import STANDARD, Kind, Mean, Metric, Registry, merge_means
from astraflow.observe.waits import Wait, WaitReason


def test_f106_means_of_unequal_parts() -> None:
    parts = [{"loss": (1.0, 1.0)}, {"loss": (200.0, 100.0)}, {"loss": (0.0, 0.0)}]
    assert merge_means(parts) == {"loss": pytest.approx(201 / 101)}


def test_f106_nothing_counted_is_absent_not_nan() -> None:
    assert merge_means([{"loss": (0.0, 0.0)}]) == {}
    assert merge_means([]) == {}
    assert Mean().value is None


def test_f106_equal_for_every_split() -> None:
    draw = random.Random(3)
    values = [draw.randrange(100) / 4 for _ in range(101)]
    want = sum(values) / len(values)
    for _ in range(50):
        cuts = sorted(draw.sample(range(102), draw.randrange(1, 9)))
        edges = [0, *cuts, len(values)]
        parts = [values[a:b] for a, b in itertools.pairwise(edges)]
        merged = merge_means([{"m": (sum(part), float(len(part)))} for part in parts])
        assert merged["m"] == want


def test_every_registered_series_exists_at_zero() -> None:
    snapshot = Registry().snapshot()
    for metric in STANDARD:
        if metric.kind is Kind.MEAN:
            assert metric.name not in snapshot
        else:
            assert snapshot[metric.name] == 0.0
    assert {f"wait_s/{wait.value}" for wait in Wait} <= set(snapshot)
    assert {f"idle_s/{why.value}" for why in WaitReason} <= set(snapshot)


def test_every_metric_says_unit_and_meaning() -> None:
    for metric in STANDARD:
        assert metric.unit
        assert len(metric.help) > 10
        assert not metric.help.endswith(".")


def test_counters_only_grow() -> None:
    registry = Registry()
    registry.add("episode/done")
    registry.add("episode/done", 2)
    assert registry.snapshot()["episode/done"] == 3.0
    for amount in (-1.0, math.nan):
        with pytest.raises(ValueError, match="cannot grow"):
            registry.add("episode/done", amount)


def test_unknown_names_and_wrong_kinds_are_refused() -> None:
    registry = Registry()
    with pytest.raises(KeyError, match="no counter episode/dnoe"):
        registry.add("episode/dnoe")
    with pytest.raises(KeyError, match="no mean episode/done"):
        registry.mean("episode/done", total=1, count=1)
    with pytest.raises(KeyError, match="no counter reward/train"):
        registry.add("reward/train")
    with pytest.raises(KeyError):
        registry.put("reward/train", 1.0)


def test_names_follow_one_form_and_are_unique() -> None:
    registry = Registry(())
    metric = Metric(name="cache/hits", kind=Kind.COUNTER, unit="hits", help="answers from the cache")
    registry.register(metric)
    with pytest.raises(ConfigError, match="twice"):
        registry.register(metric)
    with pytest.raises(ConfigError, match="noun/aspect"):
        registry.register(Metric(name="Hits", kind=Kind.COUNTER, unit="hits", help="answers from the cache"))


def test_a_mean_gathers_pairs() -> None:
    registry = Registry()
    registry.mean("reward/train", total=1.0, count=1)
    registry.mean("reward/train", total=200.0, count=100)
    assert registry.snapshot()["reward/train"] == pytest.approx(201 / 101)


def test_prometheus_text() -> None:
    registry = Registry(
        (
            Metric(name="step/done", kind=Kind.COUNTER, unit="steps", help="steps that made a version"),
            Metric(name="loop/lag_s", kind=Kind.GAUGE, unit="seconds", help="how late the loop is"),
            Metric(name="reward/train", kind=Kind.MEAN, unit="reward", help="mean score of episodes"),
        )
    )
    registry.add("step/done", 3)
    registry.put("loop/lag_s", 0.25)
    registry.mean("reward/train", total=2.5, count=4)
    assert registry.prometheus({"run": 'a"b'}).splitlines() == [
        "# HELP astraflow_step_done_total steps that made a version [steps]",
        "# TYPE astraflow_step_done_total counter",
        'astraflow_step_done_total{run="a\\"b"} 3',
        "# HELP astraflow_loop_lag_s how late the loop is [seconds]",
        "# TYPE astraflow_loop_lag_s gauge",
        'astraflow_loop_lag_s{run="a\\"b"} 0.25',
        "# HELP astraflow_reward_train_sum mean score of episodes [reward]",
        "# TYPE astraflow_reward_train_sum counter",
        'astraflow_reward_train_sum{run="a\\"b"} 2.5',
        "# HELP astraflow_reward_train_count mean score of episodes [reward]",
        "# TYPE astraflow_reward_train_count counter",
        'astraflow_reward_train_count{run="a\\"b"} 4',
    ]


@pytest.mark.parametrize(
    ("value", "text"), [(math.nan, "NaN"), (math.inf, "+Inf"), (-math.inf, "-Inf"), (1e20, "1e+20")]
)
def test_prometheus_numbers(value: float, text: str) -> None:
    registry = Registry((Metric(name="a/b", kind=Kind.GAUGE, unit="things", help="a number of things"),))
    registry.put("a/b", value)
    assert registry.prometheus().splitlines()[-1] == f"astraflow_a_b {text}"
