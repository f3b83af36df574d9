"""The ledger obeys its model under any sequence of calls, deaths and faults."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.machine import LedgerMachine

CHECKS = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)


def test_guarantee_ledger_model() -> None:
    run_state_machine_as_test(
        LedgerMachine,
        settings=settings(
            max_examples=20,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            suppress_health_check=CHECKS,
            phases=(Phase.generate,),
            database=None,
        ),
    )
