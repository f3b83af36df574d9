"""Parts joined to a batch and cut again: every column goes along, in its place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from astraflow.errors import InvalidRecord
from astraflow.losses import LossInputs
from astraflow.losses.whole import joined, parted
from tests.unit.losses.lab import COLUMNS, batch, of_sequences, take


def parts_of(inputs: LossInputs) -> list[LossInputs]:
    cut = [take(inputs, of_sequences(inputs, each)) for each in ([0, 1], [2], [3])]
    return [replace(each, batch_tokens=9, batch_sequences=4) for each in cut]


def test_joined_is_the_batch_with_its_own_denominators() -> None:
    inputs = batch()
    whole = joined(parts_of(inputs))
    assert (whole.batch_tokens, whole.batch_sequences, whole.prepared) == (None, None, False)
    for name in COLUMNS:
        expected, found = getattr(inputs, name), getattr(whole, name)
        assert (found is None) if expected is None else torch.equal(found, expected), name


def test_parted_undoes_joined_and_takes_along_what_was_decided() -> None:
    parts = parts_of(batch())
    whole = replace(joined(parts), kept=torch.arange(10) % 3 == 0, batch_chosen=5, prepared=True)
    found = parted(whole, parts)
    assert [len(each.logprobs) for each in found] == [4, 4, 2]
    assert {(each.batch_tokens, each.batch_sequences, each.batch_chosen, each.prepared) for each in found} == {
        (9, 4, 5, True)
    }
    assert torch.cat([each.kept for each in found if each.kept is not None]).tolist() == whole.kept.tolist()  # type: ignore[union-attr]
    for before, after in zip(parts, found, strict=True):
        assert torch.equal(before.advantages, after.advantages) and torch.equal(before.sequence_ids, after.sequence_ids)


def test_empty_parts_are_parts() -> None:
    inputs = batch()
    empty = take(inputs, torch.zeros(0, dtype=torch.int64))
    parts = [empty, inputs, empty]
    assert [len(each.logprobs) for each in parted(joined(parts), parts)] == [0, 10, 0]


def test_a_column_that_only_some_parts_have_is_refused_by_name() -> None:
    first, *others = parts_of(batch())
    with pytest.raises(InvalidRecord, match=r"LossInputs\.ages: 2 of 3 parts have it, all or none must"):
        joined([replace(first, ages=None), *others])
