"""Which rows are a pair: named ones, else the best of a group with the worst."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from astraflow.errors import InvalidRecord
from astraflow.trainer.pairing import pair_numbers
from astraflow.types import AdvantageRun, Row, SampleKind


def row(name: str, value: float, *, trained: bool = True, supervised: bool = False, **more: Any) -> Row:
    mask = np.array([False, trained, trained], np.bool_)
    return Row(
        sample_id=name,
        tokens=np.array([1, 2, 3], np.int32),
        mask=mask,
        logprobs=np.zeros(3, np.float32),
        advantages=(AdvantageRun(start=1, stop=3, value=value),),
        kind=SampleKind.SUPERVISED if supervised else SampleKind.RL,
        **more,
    )


def group(*values: float, number: int = 7) -> list[Row]:
    return [row(f"{number}/{index}/a/0", value) for index, value in enumerate(values)]


def paired(rows: list[Row]) -> set[frozenset[int]]:
    numbers = pair_numbers(rows).tolist()
    return {frozenset(n for n, other in enumerate(numbers) if other == number) for number in set(numbers) - {-1}}


def test_best_with_worst_then_second_with_last_but_one() -> None:
    assert paired(group(0.1, 0.9, -0.5, 0.4)) == {frozenset({1, 2}), frozenset({0, 3})}
    assert paired(group(1.0, -1.0)) == {frozenset({0, 1})}


def test_a_middle_one_is_left_over() -> None:
    assert paired(group(0.0, 1.0, -1.0)) == {frozenset({1, 2})}
    assert pair_numbers(group(0.0, 1.0, -1.0))[0] == -1


def test_equals_are_no_pair() -> None:
    assert paired(group(0.5, 0.5, 0.5, 0.5)) == set()
    assert len(paired(group(1.0, 0.5, 0.5, 0.0))) == 1
    assert len(paired(group(1.0, 1.0, 0.0, 0.0))) == 2


def test_only_rows_of_one_group_agent_place_and_use_are_compared() -> None:
    assert paired([row("1/0/a/0", 1.0), row("2/0/a/0", -1.0)]) == set()
    assert paired([row("1/0/a/0", 1.0), row("1/0/b/0", -1.0)]) == set()
    assert paired([row("1/0/a/0", 1.0), row("1/1/a/1", -1.0)]) == set()
    assert paired([row("1/0/a/0", 1.0), row("1/1/a/0", -1.0, use=1)]) == set()
    two = [*group(1.0, -1.0, number=1), *group(-2.0, 2.0, number=2)]
    assert paired(two) == {frozenset({0, 1}), frozenset({2, 3})}


def test_masked_and_supervised_rows_are_in_no_pair() -> None:
    rows = [row("1/0/a/0", 1.0), row("1/1/a/0", -9.0, trained=False), row("1/2/a/0", 0.0, supervised=True)]
    assert paired(rows) == set()
    assert paired([*rows, row("1/3/a/0", 0.5)]) == {frozenset({0, 3})}


def test_worth_is_the_mean_over_the_trained_tokens() -> None:
    """Two turns: 1 and -4 make -1.5."""
    runs = (AdvantageRun(start=1, stop=2, value=1.0), AdvantageRun(start=2, stop=3, value=-4.0))
    turns = msgspec.structs.replace(row("1/0/a/0", 0.0), advantages=runs)
    rows = [turns, row("1/1/a/0", -1.0), row("1/2/a/0", -1.2), row("1/3/a/0", 0.0)]
    assert paired(rows) == {frozenset({0, 3}), frozenset({1, 2})}


def test_named_pairs_are_left_as_they_are_named() -> None:
    rows = [row("1/0/a/0", 1.0, pair="x"), row("9/0/b/3", 1.0, pair="x"), *group(3.0, -3.0)]
    assert paired(rows) == {frozenset({0, 1})}
    alone = [row("1/0/a/0", 1.0, pair="x"), row("1/1/a/0", 0.0, pair="y")]
    assert paired(alone) == set()


def test_three_of_one_name_are_refused() -> None:
    rows = [row(f"1/{n}/a/0", float(n), pair="x") for n in range(3)]
    with pytest.raises(InvalidRecord, match="pair 'x' has 3 rows, a pair has two: 1/2/a/0"):
        pair_numbers(rows)


def test_the_same_whatever_the_order_of_rows() -> None:
    rows = group(0.1, 0.9, -0.5, 0.4, 0.2)
    turned = rows[::-1]
    names = {frozenset(rows[n].sample_id for n in pair) for pair in paired(rows)}
    assert names == {frozenset(turned[n].sample_id for n in pair) for pair in paired(turned)}


def test_nothing_is_nothing() -> None:
    assert pair_numbers([]).tolist() == []
