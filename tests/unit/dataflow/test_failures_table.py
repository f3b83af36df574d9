"""docs/failures.md, second table: what dataflow does with each ending, one test a cell, on the real service."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from astraflow.algorithms.credit import GroupMean
from astraflow.dataflow.settings import EvalSpec
from astraflow.types import Episode, FailureKind, Lease, Outcome, Purpose
from tests.unit.dataflow.rig import Rig, make_spec, tasks
from tests.unit.failures_doc import KINDS, PLACES

ODD = 10.0
"""Reward of the member that ends otherwise: in a baseline it would show."""


def ending_of(rig: Rig, lease: Lease, name: str) -> Episode:
    """An episode that ended as the row says, with the tokens that were sampled up to then."""
    whole = rig.episode(lease, None if "not scored" in name else ODD, spans=[(0, rig.digest("p")[1])])
    if name.startswith("completed"):
        return whole
    if name.startswith("truncated"):
        return msgspec.structs.replace(whole, outcome=Outcome.TRUNCATED)
    kind, _, rest = name.removeprefix("failed(").partition(")")
    return msgspec.structs.replace(
        whole, outcome=Outcome.FAILED, failure=FailureKind(kind), error="boom", final="final" in rest, score=None
    )


def spec_of_four(**more: object) -> object:
    return make_spec(group_size=4, groups_per_batch=1, credit=GroupMean(std=False), **more)  # type: ignore[arg-type]


def end(rig: Rig, name: str, *, members: int) -> int:
    """Members 0… of group 1 end so as often as they are asked, the others get 0, 1, 1…; returns member 0's attempts."""
    attempts = 0
    while leases := [lease for lease in rig.lease(4).leases if lease.group == 1]:
        for lease in leases:
            if lease.index < members:
                attempts += lease.index == 0
                rig.submit(lease, episode=ending_of(rig, lease, name))
            else:
                rig.submit(lease, float(lease.index > 1))
    rig.balanced()
    return attempts


def played_again(name: str) -> str:
    with Rig(spec_of_four()) as rig:  # type: ignore[arg-type]
        return "yes" if end(rig, name, members=1) > 1 else "no"


def given_up_after(name: str) -> str:
    with Rig(spec_of_four()) as rig:  # type: ignore[arg-type]
        attempts = end(rig, name, members=1)
        state = rig.db.one("SELECT state FROM episodes WHERE group_id = 1 AND idx = 0")
        return str(attempts) if state == ("given_up",) else "-"


def in_the_baseline(name: str) -> str:
    """Member 1 got 0: its advantage is minus the mean of those that count."""
    with Rig(spec_of_four()) as rig:  # type: ignore[arg-type]
        epoch = rig.resume()
        end(rig, name, members=1)
        rows = rig.take(epoch).rows
        value = next(run.value for row in rows for run in row.advantages if row.sample_id.startswith("1/1/"))
        return {-2 / 3: "no", -12 / 4: "yes"}[next(mean for mean in (-2 / 3, -3.0) if value == pytest.approx(mean))]


def its_tokens(name: str) -> str:
    with Rig(spec_of_four()) as rig:  # type: ignore[arg-type]
        epoch = rig.resume()
        end(rig, name, members=1)
        batch = rig.take(epoch)
        rig.commit(batch)
        state, mask = rig.db.one("SELECT state, mask FROM samples WHERE group_id = 1 AND idx = 0")
        in_batch = any(row.sample_id.startswith("1/0/") for row in batch.rows)
        assert in_batch == (state == "trained")
        assert batch.sequences == len(batch.rows) == (4 if in_batch else 3)
        return str(state) if mask is None else f"{state}({mask})"


def three_of_four(name: str) -> str:
    with Rig(spec_of_four()) as rig:  # type: ignore[arg-type]
        end(rig, name, members=3)
        state, reason = rig.group(1)
        return state if reason is None else f"{state}({reason})"


def in_an_evaluation(name: str) -> str:
    evals = EvalSpec(tasks=tasks(1, name="held"), count=1, every=0, episodes=2)
    with Rig(make_spec(evals=evals)) as rig:
        while leases := [lease for lease in rig.lease(1).leases if lease.purpose is Purpose.EVAL]:
            for lease in leases:
                rig.submit(lease, episode=ending_of(rig, lease, name) if lease.index == 0 else None)
        (point,) = rig.go(rig.flow.status()).evals
        assert point.episodes == 2
        return {((ODD + 1) / 2, 1.0): "its score", (0.5, 0.5): "wrong, not covered"}[point.score, point.coverage]


COLUMNS: dict[str, Callable[[str], str]] = {
    "played again": played_again,
    "given up after": given_up_after,
    "in the baseline": in_the_baseline,
    "its tokens": its_tokens,
    "three of four end so": three_of_four,
    "in an evaluation": in_an_evaluation,
}


@pytest.mark.parametrize(("ending", "column"), [(ending, column) for ending in KINDS for column in COLUMNS])
def test_guarantee_failed_never_in_baseline_cell_by_cell(ending: str, column: str) -> None:
    assert COLUMNS[column](ending) == KINDS[ending][column]


def test_the_table_has_every_ending_and_every_column() -> None:
    failures = {f"failed({kind})" for kind in FailureKind}
    assert failures <= set(KINDS)
    assert set(COLUMNS) == set(next(iter(KINDS.values())))
    ends = {row["the episode is"] for row in PLACES.values()} - {"no failure"}
    assert ends <= set(KINDS), "a place leads to an ending that the second table does not have"
