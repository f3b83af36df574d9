"""The control law: what it says for given numbers, what it never does, and that it settles after a step of load."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.dataflow.autoscale import GROW, HOLD, SHRINK, Measured, Scaling, decide
from astraflow.errors import ConfigError

LAW = Scaling(least=1, most=1000, dead_band=0.0, growth=100.0, cool_down_s=1.0)
MEASURED = st.builds(
    Measured,
    workers=st.integers(0, 500),
    span_s=st.floats(0, 500),
    wait=st.none() | st.floats(0, 1),
    consumed=st.floats(0, 1e4),
    produced=st.floats(0, 1e4),
)
SCALING = st.builds(
    lambda least, extra, low, high, spare, dead, growth: Scaling(
        least=least, most=least + extra, wait_low=low, wait_high=low + high, spare=spare, dead_band=dead, growth=growth
    ),
    st.integers(0, 50),
    st.integers(0, 500),
    st.floats(0, 0.2),
    st.floats(0, 0.5),
    st.floats(1, 2),
    st.floats(0, 0.5),
    st.floats(1.01, 10),
)


def after(count: int, wait: float, consumed: float = 1.0, produced: float = 1.0) -> tuple[str, int]:
    found = decide(LAW, Measured(workers=count, span_s=60, wait=wait, consumed=consumed, produced=produced))
    return found.action, found.workers


@pytest.mark.parametrize(
    ("count", "wait", "consumed", "produced", "expected"),
    [
        (4, 0.11, 1, 1, (GROW, 5)),  # ⌈4 / 0.89⌉ = ⌈4.49⌉
        (4, 0.10, 1, 1, (HOLD, 4)),  # not above
        (9, 0.25, 1, 1, (GROW, 12)),  # ⌈9 / 0.75⌉, exactly 12
        (10, 0.5, 1, 1, (GROW, 20)),
        (10, 0.07, 1, 9, (HOLD, 10)),  # between the thresholds
        (10, 0.05, 1, 9, (HOLD, 10)),  # not below
        (10, 0.04, 1, 2, (SHRINK, 6)),  # ⌈1.1 · 10 / 2⌉ = ⌈5.5⌉
        (10, 0.0, 1, 1.05, (HOLD, 10)),  # min(10, ⌈10.48⌉)
        (10, 0.0, 1, 1.1, (HOLD, 10)),  # ⌈1.1 · 10 / 1.1⌉ is 10, not 11
        (10, 0.0, 2, 1, (HOLD, 10)),  # production is not above consumption
        (10, 0.0, 0, 1, (HOLD, 10)),  # nothing is consumed: nothing is known
        (10, 0.0, 0, 0, (HOLD, 10)),
        (1, 0.0, 1, 100, (HOLD, 1)),  # at least one
    ],
)
def test_the_law_by_numbers(
    count: int, wait: float, consumed: float, produced: float, expected: tuple[str, int]
) -> None:
    assert after(count, wait, consumed, produced) == expected


def test_a_trainer_that_only_waits_asks_for_a_bounded_number() -> None:
    law = Scaling(growth=2.0, most=1000, cool_down_s=1.0)
    found = decide(law, Measured(workers=10, span_s=60, wait=1.0))
    assert (found.action, found.workers) == (GROW, 20)


@pytest.mark.parametrize(
    ("trains", "span_s", "reason"),
    [
        (False, 90.0, "no trainer is there to be measured"),
        (True, 0.0, "not measured yet: the same workers must have served for 60 s"),
        (True, 90.0, "not measured yet: the trainer was not there for all of the last 90 s"),
    ],
)
def test_why_nothing_is_measured(trains: bool, span_s: float, reason: str) -> None:
    found = decide(Scaling(), Measured(workers=1, span_s=span_s, trains=trains))
    assert (found.action, found.reason) == (HOLD, reason)


@given(SCALING, MEASURED)
def test_limits_hold_whatever_is_measured(law: Scaling, measured: Measured) -> None:
    found = decide(law, measured)
    assert law.least <= found.workers <= law.most
    assert found.reason
    if found.action == HOLD:
        assert found.workers == measured.workers
    else:
        assert (found.workers > measured.workers) is (found.action == GROW)


@given(SCALING, MEASURED)
def test_nothing_is_decided_before_it_was_measured_long_enough(law: Scaling, measured: Measured) -> None:
    if law.least <= measured.workers <= law.most and (measured.span_s < law.cool_down_s or measured.wait is None):
        assert decide(law, measured).action == HOLD


@given(SCALING, MEASURED)
def test_the_dead_band_between_the_thresholds(law: Scaling, measured: Measured) -> None:
    inside = measured.wait is not None and law.wait_low <= measured.wait <= law.wait_high
    if inside and law.least <= measured.workers <= law.most:
        assert decide(law, measured).action == HOLD


@given(SCALING, MEASURED)
def test_small_changes_are_not_made(law: Scaling, measured: Measured) -> None:
    if law.least <= measured.workers <= law.most:
        found = decide(law, measured)
        change = abs(found.workers - measured.workers)
        assert change == 0 or change >= law.dead_band * measured.workers - 1e-6


@given(SCALING, MEASURED)
def test_growth_is_bounded(law: Scaling, measured: Measured) -> None:
    if measured.workers >= max(1, law.least):
        assert decide(law, measured).workers <= max(measured.workers + 1, measured.workers * law.growth)


@given(MEASURED, st.floats(0, 1), st.floats(0, 1))
def test_a_hungrier_trainer_never_gets_fewer(measured: Measured, one: float, two: float) -> None:
    def count(wait: float) -> int:
        return decide(
            LAW,
            Measured(
                workers=measured.workers,
                span_s=60,
                wait=wait,
                consumed=measured.consumed,
                produced=measured.produced,
            ),
        ).workers

    low, high = sorted((one, two))
    assert count(low) <= count(high)


# ── after a step of load ──


@dataclass
class Plant:
    """A trainer that can use ``need`` workers' output, and workers that take ``start_s`` to serve.

    w = max(0, 1 − G / need); workers are active for min(1, need / G) of their time; both as the service measures them.
    """

    need: float
    start_s: float = 30.0
    noise: float = 0.0
    now: float = 0.0
    workers: int = 1
    changed_at: float = 0.0
    coming: list[float] = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    history: list[int] = field(default_factory=list)

    def measured(self) -> Measured:
        wait = max(0.0, 1.0 - self.workers / self.need) if self.need else 0.0
        active = min(1.0, self.need / self.workers) if self.workers else 0.0
        brought = self.workers * active * self.rng.uniform(1 - self.noise, 1 + self.noise)
        return Measured(
            workers=self.workers,
            span_s=self.now - self.changed_at,
            wait=min(1.0, max(0.0, wait + self.rng.uniform(-self.noise, self.noise) * 0.2)),
            consumed=min(self.need, self.workers),
            produced=brought / max(active, 0.02),
        )

    def turn(self, law: Scaling, seconds: float) -> None:
        self.now += seconds
        arrived = sum(at <= self.now for at in self.coming)
        self.coming = [at for at in self.coming if at > self.now]
        if arrived:
            self.workers, self.changed_at = self.workers + arrived, self.now
        found = decide(law, self.measured())
        if found.action == GROW:
            missing = found.workers - self.workers - len(self.coming)
            self.coming += [self.now + self.start_s] * max(0, missing)
        elif found.action == SHRINK and not self.coming:
            self.workers, self.changed_at = found.workers, self.now
        self.history.append(self.workers)

    def run(self, law: Scaling, minutes: float) -> None:
        for _ in range(int(minutes * 12)):
            self.turn(law, 5.0)


PLANT_LAW = Scaling(least=1, most=64, cool_down_s=20.0, window_s=60.0)


@settings(deadline=None)
@given(st.floats(1.0, 60.0), st.floats(1.0, 60.0), st.integers(1, 64))
def test_after_a_step_it_settles_and_stays(before: float, then: float, begin: int) -> None:
    """Enough workers within half an hour, no more than the spare asks for, and no change any more afterwards."""
    plant = Plant(need=before, workers=begin)
    plant.run(PLANT_LAW, 30)
    plant.need = then
    plant.run(PLANT_LAW, 30)
    assert 1 - plant.workers / then <= PLANT_LAW.wait_high + 1e-9
    assert plant.workers <= max(math.ceil(PLANT_LAW.spare * then) + PLANT_LAW.dead_band * plant.workers + 1, 1)
    settled = len(plant.history)
    plant.run(PLANT_LAW, 30)
    assert set(plant.history[settled:]) == {plant.workers}


@pytest.mark.parametrize("seed", range(20))
def test_noise_makes_it_no_pendulum(seed: int) -> None:
    """Ten per cent of noise on every rate: after a step up and a step down at most a few changes, none of them back
    and forth between far apart numbers."""
    plant = Plant(need=8.0, workers=2, noise=0.1, rng=random.Random(seed))
    for need in (8.0, 30.0, 8.0):
        plant.need = need
        plant.run(PLANT_LAW, 20)
        late = plant.history[-60:]
        assert max(late) - min(late) <= max(2, 0.25 * need), late
        assert min(late) >= 0.85 * need


def test_none_for_a_while_comes_back() -> None:
    plant = Plant(need=5.0, workers=5)
    plant.run(PLANT_LAW, 2)
    plant.workers, plant.changed_at = 0, plant.now  # all were taken away
    plant.run(PLANT_LAW, 10)
    assert plant.workers >= 5


def test_it_does_not_start_more_while_some_are_starting() -> None:
    plant = Plant(need=40.0, workers=4, start_s=600.0)
    plant.run(PLANT_LAW, 9)
    assert len(plant.coming) == 4  # growth is bounded by two, asked for once


@pytest.mark.parametrize(
    "wrong",
    [
        {"least": -1},
        {"least": 5, "most": 4},
        {"most": 10**6},
        {"wait_low": 0.2, "wait_high": 0.1},
        {"wait_high": 1.0},
        {"spare": 0.9},
        {"spare": float("inf")},
        {"dead_band": 1.0},
        {"growth": 1.0},
        {"cool_down_s": 0.0},
        {"cool_down_s": 100.0, "window_s": 50.0},
        {"window_s": float("inf")},
        {"wait_low": float("nan")},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="Scaling"):
        Scaling(**wrong)  # type: ignore[arg-type]
