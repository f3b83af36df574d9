"""Deltas carry every bit of every change, and lead nowhere but from their base to their target."""

from __future__ import annotations

import gc
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from astraflow.errors import DigestMismatch, FullTransferNeeded
from astraflow.weights import delta_write
from astraflow.weights.delta import _each, apply_delta, encode_delta, merge_deltas, read_header
from astraflow.weights.delta_file import PAGE, build, parse
from astraflow.weights.delta_streams import find_changes, to_gaps, to_positions
from astraflow.weights.digest import digest_tensors, quick_digest
from astraflow.weights.tensors import of_array
from tests.unit.weights.arrays import DTYPES, bf16, copy, nudge, same, weights
from tests.unit.weights.breaking import break_at


def test_there_and_checked() -> None:
    base = weights()
    new = nudge(base)
    delta = encode_delta(base, new)
    held = copy(base)
    apply_delta(held, delta)
    assert same(held, new) and held["head"] is held["embed"]
    header = read_header(delta)
    assert header.tensors == len({id(array) for array in base.values()}) - 1  # an empty tensor never changes
    assert header.changed > 0


def test_digests_may_be_given() -> None:
    base = weights()
    new = nudge(base)
    before, after = digest_tensors(base), digest_tensors(new)
    header = read_header(encode_delta(base, new, base_digest=before, target_digest=after))
    assert (header.base, header.target) == (before, after)
    plain = read_header(encode_delta(base, new))
    assert (plain.base, plain.target) == ("", "") and plain[2:] == header[2:]
    own = [of_array(name, array) for name, array in base.items()]
    assert plain.base_xxh3 == quick_digest(own)


def test_same_input_same_bytes_however_many_threads() -> None:
    base = weights()
    new = nudge(base)
    assert len({encode_delta(base, new, threads=threads) for threads in (0, 1, 3)}) == 1


def test_no_change_is_a_delta_too() -> None:
    base = weights()
    delta = encode_delta(base, copy(base))
    apply_delta(base, delta)
    assert same(base, weights()) and not len(parse(delta).entries)


def test_f72_bits_are_compared_and_not_values() -> None:
    base = np.array([0x3F80, 0x3F80, 0x0000, 0x7FC0, 0x7FC0] + [1] * 20, np.uint16)
    new = np.array([0x4080, 0x3F81, 0x8000, 0x7FC0, 0x7FC1] + [1] * 20, np.uint16)
    changes = find_changes(base, new)
    assert changes is not None and list(to_positions(changes.gaps)) == [0, 1, 2, 4]
    apply_delta(held := {"w": base.copy()}, encode_delta({"w": base}, {"w": new}))
    assert np.array_equal(held["w"], new)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_f72_zeros_nans_and_infinities_of_numpy_floats(dtype: str) -> None:
    base = np.zeros(40, dtype)
    base[5:8] = [np.inf, np.nan, 1]
    new = base.copy()
    new[[0, 5, 7]] = [-0.0, -np.inf, np.nan]
    bits = new.view(f"u{new.itemsize}")
    bits[6] += 1  # another NaN
    apply_delta(held := {"w": base.copy()}, encode_delta({"w": base}, {"w": new}))
    assert held["w"].tobytes() == new.tobytes()


@settings(max_examples=120, deadline=None)
@given(st.data(), st.sampled_from(DTYPES))
def test_lossless_for_any_bits(data: st.DataObject, dtype: str) -> None:
    unsigned = f"u{np.dtype(dtype).itemsize}"
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9))
    base = data.draw(hnp.arrays(unsigned, shape)).view(dtype)
    new = base.copy()
    bits = new.reshape(-1).view(unsigned)
    if bits.size:
        places = data.draw(st.lists(st.integers(0, bits.size - 1), max_size=bits.size))
        for place in places:
            bits[place] = data.draw(st.integers(0, int(np.iinfo(unsigned).max)))
    delta = encode_delta({"w": base}, {"w": new}, threads=1)
    apply_delta(held := {"w": base.copy()}, delta, threads=1)
    assert held["w"].tobytes() == new.tobytes() and held["w"].shape == shape


def test_bf16_by_name_of_its_dtype() -> None:
    rng = np.random.default_rng(0)
    base = bf16(rng.normal(size=(50, 20)))
    new = nudge({"w": base})["w"]
    delta = encode_delta({"w": of_array("w", base, dtype="BF16")}, {"w": of_array("w", new, dtype="BF16")})
    assert parse(delta).entries[0].dtype == "BF16"
    held = {"w": of_array("w", base.copy(), dtype="BF16")}
    apply_delta(held, delta)
    assert held["w"].data.tobytes() == new.tobytes()
    with pytest.raises(FullTransferNeeded, match="is U16"):
        apply_delta({"w": base.copy()}, delta)


def test_more_than_a_third_travels_whole() -> None:
    base = {"w": np.zeros(300, np.uint16), "v": np.zeros(300, np.uint16)}
    new = copy(base)
    new["w"][:100] = 5
    new["v"][:101] = 5
    entries = {entry.name: entry for entry in parse(encode_delta(base, new)).entries}
    assert not entries["w"].whole and entries["w"].changed == 100
    assert entries["v"].whole and entries["v"].changed == 300
    apply_delta(base, encode_delta(base, new))
    assert same(base, new)


def test_many_pages_and_far_positions() -> None:
    rng = np.random.default_rng(0)
    base = {"w": rng.integers(0, 1 << 16, 3_000_000, dtype=np.uint16), "whole": np.zeros(200_000, np.uint32)}
    new = nudge(base, share=0.01)
    new["whole"] = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    new["w"][[0, 1, -1]] ^= 1
    delta = encode_delta(base, new)
    assert len(next(e for e in parse(delta).entries if e.name == "w").gaps) > 1 + 20_000 // PAGE
    apply_delta(held := copy(base), delta)
    assert same(held, new)


def test_gaps_and_positions() -> None:
    for positions in ([], [0], [9], [0, 1, 2], [0, 5, 6, 4_000_000_000]):
        size = 5_000_000_000 if positions and positions[-1] > 9 else 10
        gaps = to_gaps(np.array(positions, np.int64), size)
        assert gaps.dtype == (np.uint64 if size > 1 << 32 else np.uint32)
        assert list(to_positions(gaps)) == positions


@pytest.mark.parametrize("what", ["gone", "new", "reshaped", "other dtype"])
def test_another_form_needs_a_full_transfer(what: str) -> None:
    base = weights()
    new = nudge(base)
    if what == "gone":
        del new["layer.1.w"]
    elif what == "new":
        new["layer.2.w"] = np.zeros(3, np.float32)
    elif what == "reshaped":
        new["layer.1.w"] = new["layer.1.w"].T.copy()
    else:
        new["layer.1.w"] = new["layer.1.w"].view(np.int16)
    with pytest.raises(FullTransferNeeded, match="full transfer needed"):
        encode_delta(base, new)
    delta = encode_delta(base, nudge(base, seed=4))
    before = copy(new)
    with pytest.raises((FullTransferNeeded, DigestMismatch), match="full transfer needed"):
        apply_delta(new, delta)
    assert same(before, new)


def test_f73_only_from_its_base_and_twice_is_once() -> None:
    w3, w4, w5 = ({"w": np.array(values + [0] * 20, np.float32)} for values in ([0, 0, 0], [1, 0, 0], [1, 2, 0]))
    delta = encode_delta(w4, w5)
    with pytest.raises(DigestMismatch, match="deltas in between"):
        apply_delta(held := copy(w3), delta)
    assert same(held, w3)
    apply_delta(held, encode_delta(w3, w4))
    apply_delta(held, delta)
    apply_delta(held, delta)
    assert same(held, w5)
    other = {"w": np.array([1, 0, 0] + [0] * 19 + [3], np.float32)}  # base 4 in name, with other bits elsewhere
    with pytest.raises(DigestMismatch):
        apply_delta(changed := copy(other), delta)
    assert same(changed, other)


def test_f74_tied_tensors_travel_once_and_are_changed_once() -> None:
    base = {"embed": bf16(np.random.default_rng(0).normal(size=(4, 2)))}
    base["head"] = base["embed"]
    new = copy(base)
    new["embed"][1, 0] += 1
    delta = encode_delta(base, new)
    (entry,) = parse(delta).entries
    assert entry.names == ("embed", "head") and read_header(delta).changed == 1
    untied = {name: array.copy() for name, array in base.items()}
    apply_delta(untied, delta)  # a receiver that unties at load
    apply_delta(held := copy(base), delta)
    assert same(held, new) and same(untied, new)
    with pytest.raises(FullTransferNeeded, match="head is not here"):
        apply_delta({"embed": base["embed"].copy()}, delta)


def test_f74_tied_here_but_not_where_it_was_made() -> None:
    made = {"embed": np.zeros(40, np.uint16), "head": np.zeros(40, np.uint16)}
    new = copy(made)
    new["embed"][3] = 1
    delta = encode_delta(made, new)
    shared = np.zeros(40, np.uint16)
    with pytest.raises(FullTransferNeeded, match="shares memory with head"):
        apply_delta({"embed": shared, "head": shared}, delta)
    both = np.zeros(60, np.uint16)
    with pytest.raises(FullTransferNeeded, match="overlap in memory"):
        apply_delta({"embed": both[:40], "head": both[20:]}, delta)
    assert not shared.any() and not both.any()


def test_f79_compared_is_what_was_published_last() -> None:
    w0, w1, w2 = (np.array(values + [0] * 9, np.float32) for values in ([0, 0, 0], [1, 0, 0], [1, 0, 5]))
    assert w1.any()
    delta = encode_delta({"w": w0}, {"w": w2})
    assert read_header(delta).changed == 2
    apply_delta(held := {"w": w0.copy()}, delta)
    assert list(held["w"][:3]) == [1, 0, 5]


def test_arrays_that_cannot_be_changed_in_place_are_refused() -> None:
    base = weights()
    delta = encode_delta(base, nudge(base))
    strided = copy(base)
    strided["layer.0.w"] = np.repeat(strided["layer.0.w"], 2, axis=1)[:, ::2]
    frozen = copy(base)
    frozen["layer.0.w"].flags.writeable = False
    for held, words in ((strided, "in one piece"), (frozen, "read-only")):
        before = {name: array.copy() for name, array in held.items()}
        with pytest.raises(FullTransferNeeded, match=words):
            apply_delta(held, delta)
        assert same(before, held)


def test_what_fails_half_way_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    base = {f"w{n}": rng.integers(0, 1 << 16, 900_000, dtype=np.uint16) for n in range(3)}
    base["tied"] = base["w1"]
    delta = encode_delta(base, nudge(base, share=0.03))
    hashed = delta_write.quick_of
    for after in (0, 1, 4, 7, 8):
        calls = 0

        def failing(tensor: Any, digest: Any, after: int = after) -> Any:
            nonlocal calls
            calls += 1
            if calls > after:
                raise MemoryError("while hashing")
            return hashed(tensor, digest)

        with monkeypatch.context() as patch:
            patch.setattr(delta_write, "quick_of", failing)
            held = copy(base)
            if after < 8:  # four names, before and after
                with pytest.raises(MemoryError):
                    apply_delta(held, delta)
                assert same(held, base)
            else:
                apply_delta(held, delta)
                assert not same(held, base)


def test_what_fails_in_the_middle_of_a_tensor_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    base = {"w": rng.integers(0, 1 << 16, 900_000, dtype=np.uint16)}
    base["tied"] = base["w"].copy()
    delta = encode_delta(base, nudge({"w": base["w"], "tied": base["w"]}, share=0.03))
    pages = len(parse(delta).entries[0].gaps) - 1
    assert pages > 2
    for fatal in range(2 * pages):
        with monkeypatch.context() as patch:
            break_at(patch, fatal, KeyboardInterrupt)
            held = copy(base)
            with pytest.raises(KeyboardInterrupt):
                apply_delta(held, delta)
            assert same(held, base)


@pytest.mark.parametrize("spoiled", ["changed", "its end", "unchanged", "whole", "tied"])
def test_another_base_is_never_touched(spoiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit anywhere, where the delta would have written and where not; every name is looked at by itself."""
    rng = np.random.default_rng(0)
    base = {name: rng.integers(0, 1 << 16, 300_000, dtype=np.uint16) for name in ("changed", "unchanged", "whole")}
    base["tied"] = base["changed"].copy()
    new = copy(base)
    new["changed"][:200_000:20] += 1
    new["tied"][:200_000:20] += 1
    new["whole"] += 1
    delta = encode_delta(base, new)
    assert {(entry.name, entry.aliases) for entry in parse(delta).entries} == {("changed", ("tied",)), ("whole", ())}
    held = copy(base)
    held["changed" if spoiled == "its end" else spoiled][-1 if spoiled == "its end" else 40] ^= 1
    before = copy(held)
    break_at(monkeypatch, 0, AssertionError)
    with pytest.raises(DigestMismatch, match="these weights are neither"):
        apply_delta(held, delta)
    assert same(held, before)


def test_a_target_that_is_not_reached_is_put_back() -> None:
    base = weights()
    parsed = parse(encode_delta(base, nudge(base)))
    lineage = ("", "", parsed.header.base_xxh3, "0" * 64)
    streams = [
        (entry, [bytes(parsed.data[at : at + entry.stream_bytes])])
        for entry, at in zip(parsed.entries, parsed.starts, strict=True)
    ]
    held = copy(base)
    with pytest.raises(DigestMismatch, match="does not lead to the weights that it names"):
        apply_delta(held, build(lineage, parsed.pcodec, streams))
    assert same(held, base)


def test_merged_is_one_after_the_other() -> None:
    versions = [weights()]
    for seed in range(4):
        versions.append(nudge(versions[-1], share=0.05, seed=seed))
    deltas = [encode_delta(a, b) for a, b in pairwise(versions)]
    merged = deltas[0]
    for delta in deltas[1:]:
        merged = merge_deltas(merged, delta)
    apply_delta(held := copy(versions[0]), merged)
    assert same(held, versions[-1])
    assert len(merged) < sum(map(len, deltas))
    left = merge_deltas(merge_deltas(deltas[0], deltas[1]), merge_deltas(deltas[2], deltas[3]))
    assert left == merged
    with pytest.raises(DigestMismatch, match="the second starts from"):
        merge_deltas(deltas[0], deltas[2])


def test_merged_back_to_the_start_is_nothing() -> None:
    base = weights()
    del base["steps"]  # of one element: it travels whole, and whole it is again
    new = nudge(base)
    both = merge_deltas(encode_delta(base, new), encode_delta(new, base))
    assert not len(parse(both).entries) and read_header(both).base == read_header(both).target
    apply_delta(held := copy(base), both)
    assert same(held, base)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_merging_agrees_with_applying(data: st.DataObject) -> None:
    """Whole or changed, tied or not, before and after: all combinations."""
    size = data.draw(st.integers(1, 30))
    states = [{name: np.zeros(size, np.uint16) for name in "abc"}]
    for _ in range(2):
        new = copy(states[-1])
        for name in "abc":
            for place in data.draw(st.lists(st.integers(0, size - 1), max_size=size)):
                new[name][place] = data.draw(st.integers(0, 3))
        states.append(new)
    first, second = (encode_delta(a, b, threads=1) for a, b in pairwise(states))
    apply_delta(held := copy(states[0]), merge_deltas(first, second, threads=1), threads=1)
    assert same(held, states[2])


def test_memory_of_many_tensors_is_little() -> None:
    """A tensor costs its entry in the index and a digest: no future, no buffer."""
    import tracemalloc

    rng = np.random.default_rng(0)
    count = 600
    base = {f"layer.{n}.weight": rng.integers(0, 1 << 16, 3000, dtype=np.uint16) for n in range(count)}
    delta = encode_delta(base, nudge(base, share=0.05))
    apply_delta(copy(base), delta, threads=2)
    held = copy(base)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        apply_delta(held, delta, threads=2)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < 1200 * count, peak


def test_after_an_error_nothing_begins() -> None:
    """What fails on one thread ends the others after what they are at; then it is raised."""
    from concurrent.futures import ThreadPoolExecutor

    begun: list[int] = []

    def call(item: int) -> int:
        begun.append(item)
        if item == 3:
            raise MemoryError
        return item

    with ThreadPoolExecutor(2) as pool:
        assert sorted(_each(pool, 2, call, [0, 1, 2])) == [0, 1, 2]
        begun.clear()
        with pytest.raises(MemoryError):
            _each(pool, 1, call, range(100))
    assert begun == [0, 1, 2, 3]


def test_memory_beyond_the_base_is_little() -> None:
    """Pages are decoded one at a time: what is held beside base and delta does not grow with the delta."""
    import tracemalloc

    rng = np.random.default_rng(0)
    base = {"w": rng.integers(0, 1 << 16, 20_000_000, dtype=np.uint16)}
    delta = encode_delta(base, nudge(base, share=0.05))
    apply_delta(held := copy(base), delta, threads=1)
    held = copy(base)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        apply_delta(held, delta, threads=1)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < 0.2 * len(delta), (peak, len(delta), sys.version)
