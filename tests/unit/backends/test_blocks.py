"""The blocks of a packed row are its mask, and cheaper than the whole of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.backends import blocks as blocks_module
from astraflow.backends.blocks import plan_blocks
from astraflow.trainer.packing import PackedRow, pack
from tests.unit.backends.rows import make_batch, make_row


def as_mask(packed: PackedRow) -> np.ndarray:
    """The blocks put together again; every query in exactly one of them."""
    length = len(packed.tokens)
    mask = np.zeros((length, length), np.bool_)
    covered = 0
    for block in plan_blocks(packed):
        assert block.start == covered
        covered = block.stop
        keys = np.concatenate([block.past, np.arange(block.start, block.stop)])
        mask[np.ix_(np.arange(block.start, block.stop), keys)] = block.seen
    assert covered == length
    return mask


@pytest.mark.parametrize("cost", [0, 50, 3500])
@given(seed=st.integers(0, 10_000), longest=st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_guarantee_blocks_are_exactly_the_mask(cost: int, seed: int, longest: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_module, "BLOCK_COST", cost)
        patch.setattr(blocks_module, "LONGEST_PIECE", 16)
        for packed in pack(make_batch(seed, longest=longest).rows, tokens_per_micro_batch=150):
            assert np.array_equal(as_mask(packed), packed.may_attend())


def test_a_quickstart_step_computes_a_quarter_of_its_square() -> None:
    random = np.random.default_rng(0)
    instruction = random.integers(7, 90, 45)
    rows = []
    for group in range(8):
        prompt = np.concatenate([instruction, random.integers(7, 90, 15)])
        for episode in range(8):
            tokens = np.concatenate([prompt, random.integers(7, 90, 8)])
            rows.append(make_row(tokens, np.arange(68) >= 60, name=f"{group}/{episode}/a/0"))
    (packed,) = pack(rows, tokens_per_micro_batch=2048)
    area = sum(block.seen.size for block in plan_blocks(packed))
    assert area * 4 < len(packed.tokens) ** 2


def test_a_long_chain_is_cut_in_pieces() -> None:
    tokens = np.arange(1000) % 90
    (packed,) = pack([make_row(tokens, np.arange(1000) >= 999)], tokens_per_micro_batch=2048)
    assert sum(block.seen.size for block in plan_blocks(packed)) < 0.65 * 999**2
