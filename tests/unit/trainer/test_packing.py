"""Packing as a tree: every trained token once, nothing sees what it should not, bounds hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.trainer.packing import PackedRow, pack
from astraflow.types import AdvantageRun, Row, SampleKind


def row(
    tokens: list[int], trained: list[int], *, name: str = "0/0/a/0", value: float = 1.0, supervised: bool = False
) -> Row:
    """A row whose trained tokens are at the indices ``trained``, each with behaviour log-prob -index."""
    mask = np.zeros(len(tokens), np.bool_)
    mask[trained] = True
    logprobs = np.where(mask, -np.arange(len(tokens)), 0).astype(np.float32)
    return Row(
        sample_id=name,
        tokens=np.array(tokens, np.int32),
        mask=mask,
        logprobs=np.zeros_like(logprobs) if supervised else logprobs,
        advantages=tuple(AdvantageRun(start=i, stop=i + 1, value=value) for i in trained),
        kind=SampleKind.SUPERVISED if supervised else SampleKind.RL,
    )


def seen_by(packed: PackedRow, query: int) -> list[int]:
    """Tokens that a query sees, in order of position: its own history."""
    keys = np.flatnonzero(packed.may_attend()[query])
    return [int(t) for t in packed.tokens[keys]]


def test_f29_target_is_predicted_by_the_token_before_it() -> None:
    (packed,) = pack([row([10, 11, 12, 13], [2, 3])], tokens_per_micro_batch=100)
    assert packed.tokens.tolist() == [10, 11, 12]  # 13 is predicted, never fed
    assert packed.targets.tolist() == [12, 13]
    assert packed.head[packed.target_head].tolist() == [1, 2]
    assert packed.logprobs.tolist() == [-2, -3]  # the values at the targets' own places: not shifted, nor twice
    assert -packed.logprobs.sum() == 5


def test_a_run_earns_its_value_at_its_last_trained_token() -> None:
    """Runs of 2, 3 and 2 tokens; of the second data masked the last token, of the third all."""
    mask = np.array([False, True, True, True, True, False, False, False])
    runs = ((1, 3, 5.0), (3, 6, 7.0), (6, 8, 9.0))
    made = Row(
        sample_id="0/0/a/0",
        tokens=np.arange(8, dtype=np.int32),
        mask=mask,
        logprobs=np.zeros(8, np.float32),
        advantages=tuple(AdvantageRun(start=a, stop=b, value=v) for a, b, v in runs),
    )
    (packed,) = pack([made], tokens_per_micro_batch=100)
    assert packed.advantages.tolist() == [5, 5, 7, 7]
    assert packed.rewards.tolist() == [0, 5, 0, 7]


def test_f29_nothing_trained_is_no_error() -> None:
    assert pack([row([10, 11, 12, 13], [])], tokens_per_micro_batch=100) == []
    assert pack([], tokens_per_micro_batch=100) == []


def test_f33_packed_sequences_do_not_see_each_other() -> None:
    (packed,) = pack([row([1, 2, 3], [1, 2]), row([4, 5, 6], [1, 2])], tokens_per_micro_batch=100)
    assert packed.tokens.tolist() == [1, 2, 4, 5]
    assert packed.positions.tolist() == [0, 1, 0, 1]
    assert [seen_by(packed, q) for q in range(4)] == [[1], [1, 2], [4], [4, 5]]
    assert 4 not in packed.targets  # nobody predicts the first token of the next sequence


def test_prompt_of_a_group_and_common_beginnings_are_stored_once() -> None:
    rows = [
        row([1, 2, 3, 7, 8, 9], [3, 4, 5]),
        row([1, 2, 3, 7, 6, 9], [3, 4, 5]),
        row([1, 2, 3, 5], [3]),
        row([1, 2, 4, 5], [3]),
    ]
    (packed,) = pack(rows, tokens_per_micro_batch=100)
    assert packed.tokens.tolist() == [1, 2, 3, 7, 6, 8, 4]
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 4, 3 - 1]
    assert len(packed.targets) == 8
    shared = [int(h) for h, t in zip(packed.head[packed.target_head], packed.targets, strict=True) if t in (7, 5)]
    assert shared.count(2) == 3  # one head predicts 7 twice and 5 once


def test_identical_rows_share_everything_and_keep_their_own_numbers() -> None:
    rows = [row([1, 2, 3], [2], name="a", value=1.0), row([1, 2, 3], [2], name="b", value=-0.5)]
    (packed,) = pack(rows, tokens_per_micro_batch=100)
    assert packed.tokens.tolist() == [1, 2]
    assert len(packed.head) == 1
    assert packed.advantages.tolist() == [1.0, -0.5]
    assert packed.sequence.tolist() == [0, 1]


def test_kinds_do_not_share_a_head() -> None:
    rows = [row([1, 2, 3], [2]), row([1, 2, 4], [2], supervised=True)]
    (packed,) = pack(rows, tokens_per_micro_batch=100)
    assert packed.head.tolist() == [1, 1]
    assert packed.head_supervised.tolist() == [False, True]
    assert packed.supervised.tolist() == [False, True]
    assert packed.target_head.tolist() == [0, 1]


def test_a_row_that_is_longer_than_the_budget_stands_alone() -> None:
    rows = [row(list(range(1, 12)), [10]), row([50, 51], [1]), row([60, 61], [1])]
    packs = pack(rows, tokens_per_micro_batch=4)
    assert sorted(len(p.tokens) for p in packs) == [2, 10]


def test_order_of_equal_rows_is_the_batch_order() -> None:
    rows = [row([9, 2, 3], [2]), row([1, 2, 3], [1]), row([1, 2, 3], [1, 2])]
    first, second = (pack(rows, tokens_per_micro_batch=100)[0] for _ in range(2))
    for name in PackedRow.__dataclass_fields__:
        assert np.array_equal(getattr(first, name), getattr(second, name))


@st.composite
def batches(draw: Any) -> list[Row]:
    """Few different tokens, so that rows share beginnings."""
    rows = []
    for n in range(draw(st.integers(1, 12))):
        tokens = draw(st.lists(st.integers(0, 2), min_size=2, max_size=9))
        trained = [i for i in range(1, len(tokens)) if draw(st.booleans())]
        rows.append(
            row(tokens, trained, name=str(n), value=draw(st.sampled_from([-1.0, 0.5])), supervised=draw(st.booleans()))
        )
    return rows


@given(rows=batches(), budget=st.integers(1, 30))
@settings(max_examples=100, deadline=None)
def test_guarantee_every_trained_token_once_with_its_own_history(rows: list[Row], budget: int) -> None:
    found = []
    for packed in pack(rows, tokens_per_micro_batch=budget):
        single = len(set(packed.sequence.tolist())) == 1
        assert len(packed.tokens) <= budget or single
        for n in range(len(packed.targets)):
            at = int(packed.head[packed.target_head[n]])
            history = seen_by(packed, at)
            assert packed.positions[at] == len(history) - 1
            found.append((int(packed.sequence[n]), history, int(packed.targets[n]), float(packed.logprobs[n])))
            origin = rows[int(packed.sequence[n])]
            assert bool(packed.supervised[n]) == (origin.kind is SampleKind.SUPERVISED)
            assert bool(packed.head_supervised[packed.target_head[n]]) == bool(packed.supervised[n])
            assert packed.advantages[n] == origin.advantages[0].value
    expected = [
        (n, [int(t) for t in each.tokens[:i]], int(each.tokens[i]), float(each.logprobs[i]))
        for n, each in enumerate(rows)
        for i in np.flatnonzero(each.mask)
    ]
    assert sorted(found) == sorted(expected)


@given(rows=batches())
@settings(max_examples=50, deadline=None)
def test_no_token_is_stored_twice_within_one_packed_row(rows: list[Row]) -> None:
    for packed in pack(rows, tokens_per_micro_batch=10_000):
        histories = [tuple(seen_by(packed, q)) for q in range(len(packed.tokens))]
        assert len(set(histories)) == len(histories)


@pytest.mark.parametrize("groups", [1, 8])
def test_quickstart_group_is_a_quarter_of_its_unshared_size(groups: int) -> None:
    generator = np.random.default_rng(0)
    instruction = generator.integers(0, 999, 45).tolist()
    rows = []
    for _ in range(groups):
        prompt = instruction + generator.integers(0, 999, 15).tolist()
        rows += [row(prompt + generator.integers(0, 999, 8).tolist(), list(range(60, 68))) for _ in range(8)]
    (packed,) = pack(rows, tokens_per_micro_batch=4096)
    assert len(packed.tokens) <= 45 + groups * (15 + 8 * 7)
    assert len(packed.tokens) * 4 < sum(len(each.tokens) for each in rows)
