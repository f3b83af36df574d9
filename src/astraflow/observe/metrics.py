"""Numbers with a unit and a help text, known before their first value. A mean is a (sum, count) pair until it is shown.

Registry.add / put / mean ──► snapshot ──► metrics.jsonl (metrics_file.py), Prometheus text, status
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from astraflow.errors import ConfigError
from astraflow.observe.waits import Wait, WaitReason


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    MEAN = "mean"


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """``noun/aspect``, or ``noun/aspect/reason`` where a family has one series a reason."""

    name: str
    kind: Kind
    unit: str
    help: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """A mean that can still be merged: equal for every split of the same values (F106)."""

    sum: float = 0.0
    count: float = 0.0

    def merge(self, other: Mean) -> Mean:
        return Mean(sum=self.sum + other.sum, count=self.count + other.count)

    @property
    def value(self) -> float | None:
        """None while nothing was counted, which is neither 0 nor NaN."""
        return self.sum / self.count if self.count else None


def merge_means(parts: Iterable[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """Means over all parts of {name: (sum, count)}; a name that nobody counted is absent."""
    totals: dict[str, Mean] = {}
    for part in parts:
        for name, (total, count) in part.items():
            totals[name] = totals.get(name, Mean()).merge(Mean(sum=total, count=count))
    return {name: mean.value for name, mean in totals.items() if mean.value is not None}


def _counter(name: str, unit: str, text: str) -> Metric:
    return Metric(name=name, kind=Kind.COUNTER, unit=unit, help=text)


def _gauge(name: str, unit: str, text: str) -> Metric:
    return Metric(name=name, kind=Kind.GAUGE, unit=unit, help=text)


def _mean(name: str, unit: str, text: str) -> Metric:
    return Metric(name=name, kind=Kind.MEAN, unit=unit, help=text)


STANDARD: tuple[Metric, ...] = (
    _counter("episode/admitted", "episodes", "episodes of groups that were opened"),
    _counter("episode/done", "episodes", "episodes stored with an outcome other than failed"),
    _counter("episode/failed", "episodes", "attempts that ended in a failure, retried ones included"),
    _counter("episode/given_up", "episodes", "episodes that failed as often as the retry limit allows"),
    _counter("group/trained", "groups", "groups in a committed batch"),
    _counter("group/dropped", "groups", "groups that will never be trained, by reason in the ledger"),
    _counter("step/committed", "steps", "optimiser steps that made a version"),
    _counter("step/skipped", "steps", "batches without signal or with a non-finite gradient"),
    _counter("token/sampled", "tokens", "tokens sampled by engines in stored episodes"),
    _counter("token/trained", "tokens", "tokens that got a gradient"),
    _counter("refused/fenced", "calls", "late calls refused because a newer attempt or trainer exists"),
    _counter("refused/closed", "calls", "results that came after their group had ended"),
    _mean("reward/train", "reward", "mean episode score of finished training episodes"),
    _mean("staleness/steps", "versions", "age at use of trained samples"),
    _gauge("eval/score", "fraction", "held-out score of the latest evaluated version"),
    _gauge("eval/coverage", "fraction", "of its episodes that were graded; the others count as wrong"),
    _gauge("policy/version", "versions", "committed steps of a policy"),
    _gauge("weights/lag", "versions", "how far the worker that is furthest behind is behind"),
    _counter("weights/bytes", "bytes", "weight files that workers downloaded, of the origin and of relays"),
    _counter("weights/download_s", "seconds", "time in which workers downloaded them"),
    _counter("weights/decode_s", "seconds", "time in which workers made weights of deltas"),
    _counter("weights/load_s", "seconds", "time in which engines took weights, beside the decoding"),
    _counter("weights/pause_s", "seconds", "time in which engines did not decode because they took weights"),
    _gauge("weights/longest_pause_s", "seconds", "the longest of these pauses"),
    _counter("weights/attest_s", "seconds", "time in which engines were looked at after they had taken weights"),
    _counter("weights/refused", "versions", "versions of which an engine did not hold what was published"),
    _counter("weights/believed", "versions", "versions of which an engine showed nothing: its word was taken"),
    _counter("relay/failed", "relays", "pulls from a relay that was dead, cut off or slow; the origin served"),
    _counter("relay/dropped", "relays", "relays that served wrong bytes and are not asked again"),
    _gauge("loop/lag_s", "seconds", "how late the event loop of dataflow is"),
    _gauge("loop/lag_max_s", "seconds", "how late it was at most within the last minute"),
    *(_counter(f"wait_s/{wait.value}", "seconds", f"time spent waiting for {wait.value}") for wait in Wait),
    *(_counter(f"idle_s/{why.value}", "seconds", f"time with nothing to hand out: {why.value}") for why in WaitReason),
)


class Registry:
    """All series of one process; every registered one exists at zero from the start."""

    def __init__(self, metrics: Iterable[Metric] = STANDARD) -> None:
        self._known: dict[str, Metric] = {}
        self._values: dict[str, float] = {}
        self._means: dict[str, Mean] = {}
        for metric in metrics:
            self.register(metric)

    def register(self, metric: Metric) -> None:
        if not re.fullmatch(r"[a-z0-9_.]+(/[a-z0-9_.]+){1,2}", metric.name):
            raise ConfigError(f"metric name must be noun/aspect or noun/aspect/reason, found {metric.name!r}")
        if metric.name in self._known:
            raise ConfigError(f"metric {metric.name} is registered twice")
        self._known[metric.name] = metric
        if metric.kind is Kind.MEAN:
            self._means[metric.name] = Mean()
        else:
            self._values[metric.name] = 0.0

    def add(self, name: str, amount: float = 1.0) -> None:
        """A counter grows by ``amount`` >= 0."""
        if not amount >= 0:
            raise ValueError(f"counter {name} cannot grow by {amount}")
        self._values[self._require(name, Kind.COUNTER)] += amount

    def put(self, name: str, value: float) -> None:
        """A gauge, or a counter that is counted elsewhere, has this value now."""
        if self._known.get(name) is None or self._known[name].kind is Kind.MEAN:
            raise KeyError(f"no gauge or counter {name} is registered")
        self._values[name] = value

    def mean(self, name: str, *, total: float, count: float) -> None:
        """``count`` more values whose sum is ``total``."""
        key = self._require(name, Kind.MEAN)
        self._means[key] = self._means[key].merge(Mean(sum=total, count=count))

    def snapshot(self) -> dict[str, float]:
        """Every counter and gauge, and every mean that counted something."""
        means = {name: mean.value for name, mean in self._means.items() if mean.value is not None}
        return {**self._values, **means}

    def catalogue(self) -> tuple[Metric, ...]:
        return tuple(self._known.values())

    def prometheus(self, labels: Mapping[str, str] | None = None) -> str:
        """Text exposition format; a mean is shown as its two counters."""
        suffix = _labels(labels or {})
        lines: list[str] = []
        for metric in self._known.values():
            name = "astraflow_" + re.sub(r"[^a-z0-9_]", "_", metric.name)
            series = [(name + ("_total" if metric.kind is Kind.COUNTER else ""), self._values.get(metric.name))]
            if metric.kind is Kind.MEAN:
                pair = self._means[metric.name]
                series = [(f"{name}_sum", pair.sum), (f"{name}_count", pair.count)]
            for series_name, value in series:
                kind = "gauge" if metric.kind is Kind.GAUGE else "counter"
                lines.append(f"# HELP {series_name} {metric.help} [{metric.unit}]")
                lines.append(f"# TYPE {series_name} {kind}")
                lines.append(f"{series_name}{suffix} {_number(value or 0.0)}")
        return "\n".join(lines) + "\n"

    def _require(self, name: str, kind: Kind) -> str:
        metric = self._known.get(name)
        if metric is None or metric.kind is not kind:
            raise KeyError(f"no {kind.value} {name} is registered")
        return name


def _labels(labels: Mapping[str, str]) -> str:
    def quoted(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    inner = ",".join(f'{key}="{quoted(value)}"' for key, value in sorted(labels.items()))
    return f"{{{inner}}}" if inner else ""


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
