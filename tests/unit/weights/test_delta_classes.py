"""Deltas by classes of magnitude: the same bits in fewer bytes, and taken back as exactly as any other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.errors import DigestMismatch, WeightsRefused
from astraflow.weights import delta_classes, delta_compact
from astraflow.weights.delta import apply_delta, compact_delta, encode_delta, merge_deltas, read_header
from astraflow.weights.delta_classes import Members
from astraflow.weights.delta_file import FLOATS, parse
from astraflow.weights.delta_streams import Streams
from astraflow.weights.tensors import SIZES, Tensor, of_array
from tests.unit.weights.arrays import Weights, moved, nudge, same, weights
from tests.unit.weights.breaking import break_at


def own(found: Weights) -> Weights:
    return {name: tensor._replace(data=tensor.data.copy()) for name, tensor in found.items()}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (delta_classes, delta_compact):
        monkeypatch.setattr(module, "BLOCK", 1000)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes however little they are worth."""
    monkeypatch.setattr(delta_compact, "WORTH", 1e9)
    monkeypatch.setattr(delta_compact, "WIDEST", 1)


def test_smaller_and_the_same_bits() -> None:
    base, new = moved(300_000)
    delta = encode_delta(base, new, base_digest="1" * 64, target_digest="2" * 64)
    small = compact_delta(delta, new)
    assert len(small) < 0.8 * len(delta)
    assert read_header(small) == read_header(delta)
    apply_delta(held := own(base), small)
    assert same(held, new)
    apply_delta(held, small)  # it is there already (F73)
    assert same(held, new)
    assert len({compact_delta(delta, new, threads=threads) for threads in (1, 3)} | {small}) == 1


def test_where_classes_are_not_worth_it_the_delta_stays_as_it_is() -> None:
    base, _ = moved(300_000)
    arrays = {name: tensor.data.view(np.uint16) for name, tensor in base.items()}
    even = {name: of_array(name, array, dtype="BF16") for name, array in nudge(arrays, share=0.01).items()}
    delta = encode_delta(base, even)
    assert compact_delta(delta, even) is delta
    whole_numbers = weights()
    other = nudge({"steps": np.arange(999)}, share=0.1)
    delta = encode_delta({"steps": np.arange(999)}, other)
    assert compact_delta(delta, other) is delta
    nothing = encode_delta(whole_numbers, whole_numbers)
    assert compact_delta(nothing, whole_numbers) is nothing
    base, new = moved(300_000)
    small = compact_delta(encode_delta(base, new), new)
    assert compact_delta(small, new) is small


def test_beside_tensors_of_other_kinds(always: None) -> None:
    """Whole, tied, integers, other dtypes, nothing changed: each as it travels otherwise, in one file."""
    base, new = moved(20_000)
    floats = np.random.default_rng(0).normal(size=9000).astype(np.float32)
    later = np.where(abs(floats) < 0.1, floats + np.float32(1e-3), floats)
    base |= {
        "f": of_array("f", floats),
        "steps": of_array("steps", np.arange(50)),
        "same": of_array("same", np.ones(3)),
    }
    new |= {"f": of_array("f", later), "steps": of_array("steps", np.arange(50) * 2), "same": base["same"]}
    few = np.arange(900)
    base["few"], new["few"] = of_array("few", few), of_array("few", np.where(few == 7, 1, few))
    base["tied"], new["tied"] = base["a"], new["a"]
    small = compact_delta(encode_delta(base, new), new)
    entries = {entry.name: entry for entry in parse(small).entries}
    assert entries["a"].aliases == ("tied",) and entries["a"].parts and entries["f"].parts and entries["b"].parts
    assert entries["steps"].whole and entries["few"].gaps and "same" not in entries
    assert sum(p.changed for p in entries["a"].parts) == entries["a"].changed
    untied = own(base)
    apply_delta(untied, small)
    assert same(untied, new)
    tied = own(base)
    tied["tied"] = tied["a"]
    apply_delta(tied, small)
    assert same(tied, new)


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from(sorted(FLOATS)))
def test_lossless_for_any_bits_of_any_float(data: st.DataObject, dtype: str) -> None:
    """Zeros of both signs, NaN payloads, infinities, changes across every edge."""
    unsigned = np.dtype(f"u{SIZES[dtype]}")
    seed, size = data.draw(st.integers(0, 1 << 32)), data.draw(st.integers(4, 400))
    rng = np.random.default_rng(seed)
    special = [0, 1, 1 << (8 * unsigned.itemsize - 1), np.iinfo(unsigned).max, np.iinfo(unsigned).max >> 1]
    bits = rng.integers(0, np.iinfo(unsigned).max, size, dtype=unsigned, endpoint=True) >> rng.integers(
        0, 12, size
    ).astype(unsigned)
    bits[rng.integers(0, size, 5)] = np.array(special, unsigned)
    after = bits.copy()
    where = rng.choice(size, data.draw(st.integers(0, size // 3)), replace=False)
    after[where] += rng.choice(
        np.array([1, -1, 1 << (8 * unsigned.itemsize - 2), 1 << FLOATS[dtype]]), len(where)
    ).astype(unsigned)
    base, new = ({"w": Tensor("w", dtype, (size,), each.view(np.uint8))} for each in (bits, after))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_compact, "WORTH", 1e9)
        patch.setattr(delta_compact, "WIDEST", 1)
        for module in (delta_classes, delta_compact):
            patch.setattr(module, "BLOCK", 64)
        small = compact_delta(encode_delta(base, new, threads=1), new, threads=1)
        apply_delta(held := own(base), small, threads=1)
    assert held["w"].data.tobytes() == after.tobytes()


def test_members_are_told_by_magnitude_alone() -> None:
    bits = np.array([0x0000, 0x8001, 0x0100, 0x80FF, 0x7FC0, 0x01FF, 0x8200], np.uint16)
    members = Members([0x100, 0x200], np.dtype(np.uint16))
    assert [list(each) for each in members.of(bits)] == [[0, 1, 3], [2, 5]]
    assert list(members.class_of(bits)) == [0, 0, 1, 0, 2, 1, 2]
    assert [list(each) for each in Members([0x100], np.dtype(np.uint16)).of(bits)] == [[0, 1, 3]]


def test_what_leaves_its_class_is_placed_by_its_position(always: None) -> None:
    """Else a change of a class would change who is a member, and nothing could be taken back."""
    base, new = moved(50_000, lr=2e-5)
    small = parse(compact_delta(encode_delta(base, new), new))
    edges = small.schemes["BF16"].edges
    members = Members(edges, np.dtype(np.uint16))
    for entry in small.entries:
        old, now = (each[entry.name].data.view(np.uint16) for each in (base, new))
        classes, after, changed = members.class_of(old), members.class_of(now), old != now
        stays = [int((changed & (classes == n) & (after == n)).sum()) for n in range(len(edges))]
        assert [part.changed for part in entry.parts] == [*stays, entry.changed - sum(stays)]
        assert (changed & (classes != after)).sum() > 10


def test_only_its_target_can_compact_it_and_nothing_merges_it() -> None:
    base, new = moved(300_000)
    delta = encode_delta(base, new)
    with pytest.raises(DigestMismatch, match="these weights are others"):
        compact_delta(delta, base)
    small = compact_delta(delta, new)
    for first, second in ((small, encode_delta(new, base)), (encode_delta(new, base), small)):
        with pytest.raises(WeightsRefused, match="cannot be merged; merge what it was made of"):
            merge_deltas(first, second)


def test_merged_and_then_compacted() -> None:
    """What a publisher does for those who missed versions: it has the newest weights."""
    base, middle = moved(300_000)
    arrays = {name: tensor.data.view(np.uint16) for name, tensor in middle.items()}
    new = {name: of_array(name, array, dtype="BF16") for name, array in nudge(arrays, share=0.001).items()}
    merged = merge_deltas(encode_delta(base, middle), encode_delta(middle, new))
    small = compact_delta(merged, new)
    assert len(small) < 0.81 * len(merged)
    apply_delta(held := own(base), small)
    assert same(held, new)


def test_another_base_is_not_touched() -> None:
    base, new = moved(300_000)
    small = compact_delta(encode_delta(base, new), new)
    other = own(base)
    other["b"].data[77] ^= 1
    before = own(other)
    with pytest.raises(DigestMismatch, match="these weights are neither"):
        apply_delta(other, small)
    assert same(other, before)


def test_what_fails_in_the_middle_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, small_blocks: None, always: None
) -> None:
    """After every single operation: any block, any of two targets, before or after those that left their class."""
    base, new = moved(2500, lr=2e-5)
    base["tied"], new["tied"] = base["a"], new["a"]
    small = compact_delta(encode_delta(base, new), new, threads=1)
    parts = parse(small).entries[0].parts
    assert any(part.changed for part in parts[:-1])
    for fatal in range(3 * 2 * 2):
        with monkeypatch.context() as patch:
            break_at(patch, fatal, KeyboardInterrupt)
            held = own(base)  # the tied one in memory of its own
            with pytest.raises(KeyboardInterrupt):
                apply_delta(held, small, threads=1)
            assert same(held, base), fatal


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_memory_that_runs_out_while_taking_back(
    monkeypatch: pytest.MonkeyPatch, small_blocks: None, always: None, failures: int
) -> None:
    """It goes on where it was; if there never is any, it says that the weights are neither the one nor the other."""
    base, new = moved(2500, lr=2e-5)
    small = compact_delta(encode_delta(base, new), new, threads=1)
    true_undo = delta_classes.Operation.undo
    calls = iter(range(1000))

    def undo(self: Any) -> None:
        if next(calls) in (2, 3, 4)[:failures]:
            raise MemoryError
        true_undo(self)

    break_at(monkeypatch, 4, MemoryError)
    monkeypatch.setattr(delta_classes.Operation, "undo", undo)
    held = own(base)
    with pytest.raises(MemoryError) as caught:
        apply_delta(held, small, threads=1)
    assert same(held, base) == (failures < 3)
    assert ("neither base nor target" in str(caught.value)) == (failures == 3)


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_memory_that_runs_out_while_tensors_are_replaced(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    """What was there is gone: it goes on, or says that the weights are neither the one nor the other."""
    base = {"w": np.zeros(200_000, np.uint16), "v": np.zeros(100, np.uint16)}
    new = {"w": np.arange(200_000).astype(np.uint16), "v": base["v"].copy()}
    new["v"][3] = 1
    delta = encode_delta(base, new)
    true_bits = Streams.bits
    calls = iter(range(1000))

    def bits(self: Any) -> Any:
        for page, found in enumerate(true_bits(self)):
            if page == 2 and next(calls) in range(1, 1 + failures):  # not while it is checked
                raise MemoryError
            yield found

    monkeypatch.setattr(Streams, "bits", bits)
    held = {name: array.copy() for name, array in base.items()}
    if failures < 3:
        apply_delta(held, delta)
        assert same(held, new)
    else:
        with pytest.raises(MemoryError, match="w for one: these weights are neither base nor target"):
            apply_delta(held, delta)


def test_memory_that_runs_out_while_plain_pages_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    base = {"w": rng.integers(0, 1 << 16, 900_000, dtype=np.uint16)}
    delta = encode_delta(base, nudge(base, share=0.03))
    true_undo = delta_classes.Operation.undo
    calls: Iterator[int] = iter(range(1000))

    def undo(self: Any) -> None:
        if next(calls) == 1:
            raise MemoryError
        true_undo(self)

    break_at(monkeypatch, 4, MemoryError)
    monkeypatch.setattr(delta_classes.Operation, "undo", undo)
    held = {"w": base["w"].copy()}
    with pytest.raises(MemoryError):
        apply_delta(held, delta, threads=1)
    assert same(held, base)
