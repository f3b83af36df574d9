from __future__ import annotations

import numpy as np
import pytest

from astraflow.algorithms.base import GroupSummary
from astraflow.algorithms.credit import GroupMean, Returns
from astraflow.algorithms.keep import DropTruncated, DropZeroVariance
from astraflow.types import Outcome, Task
from tests.unit.dataflow_pure.build import table


def summary(units) -> GroupSummary:
    return GroupSummary(
        group=1,
        policy="m0",
        task=Task(key="t"),
        size=len(units),
        outcomes=units.outcome,
        units=units,
        min_version=0,
        arrival=1,
    )


def zero_variance(rewards, *, credit, **more):
    units = table(rewards, **more)
    return DropZeroVariance().verdict(summary(units), credit.group(units))


@pytest.mark.parametrize("credit", [GroupMean(), GroupMean(std=False), Returns()])
@pytest.mark.parametrize("rewards", [[0.1] * 16, [0.9] * 3, [1.0] * 4, [0.0] * 4, [None, 1.0, 1.0]])
def test_f34_zero_variance_compares_raw_rewards(credit, rewards):
    assert zero_variance(rewards, credit=credit) == "zero_variance"


@pytest.mark.parametrize("credit", [GroupMean(), Returns()])
def test_f34_a_small_difference_is_kept(credit):
    assert zero_variance([0, 0, 0, 1e-3], credit=credit) is None


def test_f35_a_group_of_one_is_told_apart():
    assert zero_variance([1.0], credit=GroupMean()) == "no_baseline"
    assert zero_variance([1.0], credit=Returns()) is None, "REINFORCE on groups of one was chosen on purpose"
    assert zero_variance([0.0], credit=Returns()) == "no_baseline"
    keys = ["solver", "solver", "verifier"]
    assert zero_variance([1, 1, 1], credit=GroupMean(), episodes=[0, 1, 0], keys=keys) == "zero_variance"


def test_one_role_with_signal_keeps_the_group():
    keys = ["solver", "solver", "verifier", "verifier"]
    assert zero_variance([1, 1, 0, 1], credit=GroupMean(), episodes=[0, 1, 0, 1], keys=keys) is None
    assert zero_variance([1, 1, 0, 0], credit=GroupMean(), episodes=[0, 1, 0, 1], keys=keys) == "zero_variance"


def test_no_unit_counts():
    assert zero_variance([None, None], credit=GroupMean()) == "no_baseline"


def truncated(*outcomes: Outcome):
    units = table([1.0, 0.0, 0.5][: len(outcomes)])
    object.__setattr__(units, "outcome", outcomes)
    keep = DropTruncated()
    return keep.verdict(summary(units), np.zeros(len(units), np.float32)), keep.mask(summary(units))


def test_truncated_members_are_masked_and_a_group_of_them_is_dropped():
    some = truncated(Outcome.COMPLETED, Outcome.TRUNCATED, Outcome.COMPLETED)
    assert some == (None, {"0/1/solver/0": "truncated"})
    assert truncated(Outcome.COMPLETED, Outcome.COMPLETED) == (None, {})
    assert truncated(Outcome.COMPLETED, Outcome.FAILED) == (None, {}), "failed is another reason"
    assert truncated(Outcome.TRUNCATED, Outcome.TRUNCATED)[0] == "truncated"
