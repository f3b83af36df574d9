"""The verdict: what the ledger claims against what is in the weights; and the figures of recovery."""

from __future__ import annotations

from astraflow.run.chaos.injury import Injury
from astraflow.run.chaos.judge import Claims, figures, judge
from astraflow.run.chaos.plan import Component, Fault, Kind
from astraflow.trainer.checkpoints import TrainedStep

STEPS = [
    TrainedStep(step=1, batch=1, trained=(("1/0/main/0", 0), ("1/1/main/0", 0))),
    TrainedStep(step=2, batch=2, trained=(("2/0/main/0", 0), ("1/0/main/0", 1))),
]
CLAIMED = frozenset({("1/0/main/0", 0), ("1/1/main/0", 0), ("2/0/main/0", 0), ("1/0/main/0", 1)})


def claims(trained: frozenset[tuple[str, int]] = CLAIMED, *without_end: str, difference: int = 0) -> Claims:
    return Claims(trained={"main": trained}, without_end=without_end, difference=difference)


def test_a_replayed_sample_is_not_trained_twice() -> None:
    """The same sample with another use is another training."""
    verdict = judge({"main": STEPS}, claims())
    assert (verdict.lost, verdict.trained_twice, verdict.only_in_history, verdict.ledger_difference) == (0, 0, 0, 0)
    assert verdict.problems == ()


def test_fencing_off_the_same_use_twice_in_one_history() -> None:
    """A batch that two trainers hold: its rows come again in the history that survives."""
    again = TrainedStep(step=3, batch=1, trained=STEPS[0].trained)
    verdict = judge({"main": [*STEPS, again]}, claims())
    assert (verdict.lost, verdict.trained_twice) == (0, 2)
    assert "more than once: 2" in verdict.problems[0]


def test_undo_off_what_the_ledger_calls_trained_is_in_no_history() -> None:
    """The trainer came back at step 1 and step 2 was not un-committed."""
    verdict = judge({"main": STEPS[:1]}, claims())
    assert (verdict.lost, verdict.trained_twice) == (2, 0)
    assert "2/0/main/0" in verdict.problems[0]


def test_trained_and_not_claimed() -> None:
    verdict = judge({"main": STEPS}, claims(CLAIMED - {("2/0/main/0", 0)}))
    assert (verdict.lost, verdict.only_in_history) == (0, 1)


def test_no_history_at_all_loses_everything_of_that_policy() -> None:
    both = Claims(trained={"main": CLAIMED, "judge": frozenset({("5/0/judge/0", 0)})}, without_end=(), difference=0)
    assert judge({"main": STEPS}, both).lost == 1


def test_what_never_ended_is_lost_and_the_ledger_may_be_off() -> None:
    verdict = judge({"main": STEPS}, claims(CLAIMED, "episode 7/1 is leased", "group 9 is ready", difference=3))
    assert (verdict.lost, verdict.ledger_difference) == (2, 3)


def injury(component: Component, kind: Kind, *, at: float, **times: float) -> Injury:
    fault = Fault(number=0, component=component, kind=kind, gap_s=0, overlaps=False, pick=0)
    return Injury(fault=fault, post=component, name=component, at=at, **times)  # type: ignore[arg-type]


def test_overhead_is_recovery_less_the_usual_cold_start() -> None:
    """Cold starts 4, 6, 9: median 6. Recoveries 5, 8, 12 from the fault: overhead -1, 2, 6."""
    done = [
        injury(Component.TRAINER, Kind.KILL, at=10, noticed_at=11, successor_at=11, recovered_at=15),
        injury(Component.TRAINER, Kind.KILL, at=20, noticed_at=25, successor_at=22, recovered_at=28),
        injury(Component.TRAINER, Kind.POINT, at=30, noticed_at=32, successor_at=33, recovered_at=42),
    ]
    found = figures(done)
    assert found["cold_start_s"] == {"trainer": 6}
    assert found["recovery_s"]["trainer"] == {"p50": 8, "p99": 12, "max": 12, "count": 3}
    assert found["recovery_overhead_s"] == {"p50": 2, "p99": 6, "max": 6, "count": 3}
    assert found["detect_s"] == {"p50": 2, "p99": 5, "max": 5, "count": 3}
    assert found["not_recovered"] == 0
    assert found["longest"] == [
        "fault 0 (kill -) of trainer: noticed after 5.0 s, recovery 8.0 s",
        "fault 0 (point -) of trainer: noticed after 2.0 s, recovery 12.0 s",
        "fault 0 (kill -) of trainer: noticed after 1.0 s, recovery 5.0 s",
    ]


def test_a_stopped_process_recovers_from_sigcont_on() -> None:
    done = [injury(Component.ROLLOUT, Kind.STOP, at=100, noticed_at=110.5, healed_at=115, recovered_at=116.5)]
    found = figures(done)
    assert found["recovery_s"]["rollout"]["p50"] == 1.5
    assert found["detect_s"]["max"] == 10.5
    assert found["cold_start_s"] == {"rollout": None}
    assert found["recovery_overhead_s"]["count"] == 0


def test_who_never_comes_back_is_counted() -> None:
    assert figures([injury(Component.DATAFLOW, Kind.KILL, at=1)])["not_recovered"] == 1
