"""The ledger obeys its model under any sequence of calls, deaths and faults."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.machine import LedgerMachine
from tests.model.replay_machine import REPLAYED, ReplayMachine

CHECKS = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)


QUICK = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=CHECKS,
    phases=(Phase.generate,),
    database=None,
)


def test_guarantee_ledger_model() -> None:
    run_state_machine_as_test(LedgerMachine, settings=QUICK)


def test_guarantee_ledger_model_with_replay() -> None:
    REPLAYED.clear()
    run_state_machine_as_test(ReplayMachine, settings=QUICK)
    assert sum(count > 0 for count in REPLAYED) > len(REPLAYED) / 2
