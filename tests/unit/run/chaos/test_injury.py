"""When a fault is over: only the useful work of the right process counts."""

from __future__ import annotations

import pytest

from astraflow.run.chaos.injury import Injury, Sighting
from astraflow.run.chaos.plan import Component, Fault, Kind


def hurt(component: Component, kind: Kind, name: str) -> Injury:
    fault = Fault(number=0, component=component, kind=kind, gap_s=0, overlaps=False, pick=0)
    return Injury(fault=fault, post=component, name=name, at=10.0)


def see(injury: Injury, *seen: tuple[float, str, str]) -> float | None:
    for at, kind, name in seen:
        injury.see(Sighting(at=at, kind=kind, name=name))
    return injury.recovered_at


def test_rollout_by_the_first_episode_of_its_own() -> None:
    """Others go on meanwhile, and a result of the dead one may still be on its way."""
    injury = hurt(Component.ROLLOUT, Kind.KILL, "rollout-1")
    assert see(injury, (9, "done", "rollout-1"), (10.1, "done", "rollout-1"), (11, "done", "rollout-0")) is None
    injury.restarted("rollout-1.2", 11.5)
    assert see(injury, (12, "done", "rollout-0"), (18, "done", "rollout-1.2"), (19, "done", "rollout-1.2")) == 18
    assert injury.cold_start_s == 6.5
    assert see(injury, (20.5, "dead", "rollout-1")) == 18
    assert injury.detect_s == 10.5 and injury.recovery_s == 8


def test_trainer_by_the_commit_after_it_has_resumed() -> None:
    """The last commit of the dead one is seen after the fault: it is none of the successor's."""
    injury = hurt(Component.TRAINER, Kind.POINT, "solver")
    assert see(injury, (10.1, "committed", "solver")) is None
    injury.restarted("trainer-solver", 11)
    assert see(injury, (11.1, "committed", "solver"), (14, "resumed", "judge"), (14.5, "committed", "solver")) is None
    assert see(injury, (15, "joined", "solver"), (15, "resumed", "solver"), (16, "committed", "judge")) is None
    assert see(injury, (17, "committed", "solver")) == 17
    assert injury.detect_s == 5


def test_dataflow_by_the_first_episode_after_its_start() -> None:
    injury = hurt(Component.DATAFLOW, Kind.KILL, "dataflow")
    assert see(injury, (10.1, "done", "rollout-0")) is None
    injury.restarted("dataflow", 10.6)
    assert see(injury, (10.7, "done", "rollout-0"), (13, "dataflow_started", ""), (13.4, "done", "rollout-2")) == 13.4
    assert injury.noticed_at == 10.6


def test_stopped_counts_from_sigcont() -> None:
    injury = hurt(Component.ROLLOUT, Kind.STOP, "rollout-0")
    assert see(injury, (10.2, "done", "rollout-0"), (20, "dead", "rollout-0")) is None
    injury.healed_at = 25.0
    assert see(injury, (25.5, "done", "rollout-1"), (26, "done", "rollout-0")) == 26
    assert injury.recovery_s == 1 and injury.detect_s == 10 and injury.cold_start_s is None


def test_a_cut_off_process_that_dies_of_it_recovers_with_its_successor() -> None:
    injury = hurt(Component.ROLLOUT, Kind.CUT, "rollout-0")
    injury.healed_at = 15.0
    injury.restarted("rollout-0.2", 16)
    assert see(injury, (16.5, "done", "rollout-0"), (22, "done", "rollout-0.2")) == 22


def test_a_later_death_is_not_the_notice_of_a_slow_connection() -> None:
    injury = hurt(Component.ROLLOUT, Kind.SLOW, "rollout-0")
    injury.healed_at = 12.0
    assert see(injury, (12.5, "done", "rollout-0")) == 12.5
    assert see(injury, (40, "dead", "rollout-0")) == 12.5
    assert injury.detect_s is None and injury.recovery_s == 0.5


@pytest.mark.parametrize("kind", [Kind.CUT, Kind.SLOW])
def test_who_is_only_cut_off_or_slowed_has_no_death_to_be_noticed(kind: Kind) -> None:
    injury = hurt(Component.ROLLOUT, kind, "rollout-0")
    assert see(injury, (15, "dead", "rollout-0")) is None
    injury.healed_at = 18.0
    assert see(injury, (18.5, "done", "rollout-0")) == 18.5
    assert injury.detect_s is None and injury.recovery_s == 0.5


def test_two_trainers_at_once_are_no_death_to_be_noticed() -> None:
    """Either is refused while it lives, and ends by itself; the one that comes after them has to commit."""
    injury = hurt(Component.TRAINER, Kind.SECOND, "solver")
    injury.restarted("trainer-solver", 11)
    assert see(injury, (23, "joined", "solver"), (23.4, "resumed", "solver"), (24, "committed", "solver")) == 24
    assert injury.detect_s is None and injury.recovery_s == 14


def test_a_death_is_noticed_by_the_dataflow_that_is_there() -> None:
    """Killed at 10, dataflow killed too and back at 13: declared dead at 24, of which nobody could know 3 s."""
    injury = hurt(Component.ROLLOUT, Kind.KILL, "rollout-0")
    see(injury, (13, "dataflow_started", ""), (24, "dead", "rollout-0"), (30, "dataflow_started", ""))
    assert injury.detect_s == 11
    dataflow = hurt(Component.DATAFLOW, Kind.KILL, "dataflow")
    dataflow.restarted("dataflow", 10.5)
    see(dataflow, (11.5, "dataflow_started", ""))
    assert dataflow.detect_s == 0.5


@pytest.mark.parametrize("back", ["dataflow_started", "dataflow_back"])
def test_a_death_is_noticed_from_when_somebody_is_there_to_notice(back: str) -> None:
    """A replacement may be at work before the dead one is missed; then dataflow is stopped for 15 s."""
    injury = hurt(Component.ROLLOUT, Kind.KILL, "rollout-1")
    injury.restarted("rollout-1.2", 11.5)
    assert see(injury, (15, "done", "rollout-1.2"), (32, back, ""), (42.5, "dead", "rollout-1")) == 15
    assert injury.detect_s == 10.5
    see(injury, (50, back, ""))
    assert injury.detect_s == 10.5
