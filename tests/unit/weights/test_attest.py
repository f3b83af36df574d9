"""Bits that an engine shows beside those that were published: each way to be wrong has its name."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from astraflow.types import Array
from astraflow.weights.attest import Diagnosis, as_dtype, compare
from astraflow.weights.tensors import Tensor, of_array

RNG = np.random.default_rng(0)
Weights = dict[str, Tensor]


def weights(**arrays: Array) -> Weights:
    return {name: of_array(name, array) for name, array in arrays.items()}


def noise(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


OLDER = {name: noise(8, 6) for name in "abcd"}
MOVES = {name: (RNG.random((8, 6)) < 0.4) * noise(8, 6) for name in "abcd"}
OLD = {name: OLDER[name] + noise(8, 6) for name in "abcd"}
NEW = {name: (OLD[name] + MOVES[name]).astype(np.float32) for name in "abcd"}


def found(held: Mapping[str, Array], *, old: Mapping[str, Array] | None = OLD) -> str:
    before = None if old is None else weights(**old)
    finding = compare(weights(**held).values(), weights(**NEW), before)
    return "" if finding is None else str(finding)


def test_what_was_published_passes_whatever_the_order_and_the_version_before() -> None:
    assert found(NEW) == found(dict(reversed(NEW.items()))) == found(NEW, old=None) == ""


def test_the_version_before_in_full_is_never_applied() -> None:
    assert found(OLD) == "never applied: all of 4 tensors are those of the version before"


@pytest.mark.parametrize("late", [("a",), ("a", "b", "c"), ("d",)])
def test_some_tensors_of_the_version_before_are_partial(late: tuple[str, ...]) -> None:
    said = found({name: OLD[name] if name in late else NEW[name] for name in NEW})
    assert said.startswith("partial: ") and f"tensor {late[0]}" in said
    assert f"{sum(int((MOVES[name] != 0).sum()) for name in late)} of " in said


def test_a_tensor_that_is_written_to_the_middle_is_partial() -> None:
    half = np.concatenate([NEW["b"][:4], OLD["b"][4:]])
    assert found({**NEW, "b": half}).startswith("partial: ")


def test_a_tensor_that_is_not_there_reshaped_or_unknown_is_partial() -> None:
    assert found({name: NEW[name] for name in "abd"}) == "partial: tensor c of 4 not held"
    assert found({name: NEW[name] for name in "bd"}) == "partial: tensor a and 1 more tensors of 4 not held"
    reshaped = {**NEW, "a": NEW["a"].reshape(6, 8)}
    assert found(reshaped) == "partial: tensor a has shape [6, 8] instead of [8, 6]"
    assert found({**NEW, "x": noise(3)}) == "partial: tensor x is held and was not published"


def test_swapped_tensors_are_partial_and_both_are_named() -> None:
    assert found({**NEW, "a": NEW["c"], "c": NEW["a"]}) == "partial: tensors a and c are swapped"
    turned = {**NEW, "a": NEW["b"], "b": NEW["c"], "c": NEW["a"]}
    assert found(turned) == "partial: tensors a and b are swapped, and 1 more"


@pytest.mark.parametrize("old", [OLD, None])
def test_an_update_on_another_base_is_wrong_base(old: Mapping[str, Array] | None) -> None:
    held = {name: (OLDER[name] + MOVES[name]).astype(np.float32) for name in NEW}
    assert found(held, old=old).startswith("wrong base: 4 of 4 tensors are neither as published nor as before")


def test_values_that_were_set_on_another_base_are_wrong_base() -> None:
    held = {name: np.where(MOVES[name] != 0, NEW[name], OLDER[name]) for name in NEW}
    said = found(held)
    assert said.startswith("wrong base: ") and "elements that the update leaves alone" in said


@pytest.mark.parametrize("bit", [0, 15, 22, 23, 30, 31])
@pytest.mark.parametrize("old", [OLD, None])
def test_one_flipped_bit_is_numerics_wherever_it_is(bit: int, old: Mapping[str, Array] | None) -> None:
    held = NEW["c"].copy()
    held.view(np.uint32).reshape(-1)[11] ^= np.uint32(1 << bit)
    assert found({**NEW, "c": held}, old=old) == "numerics: 1 bit in 1 element flipped, tensor c, element 11"


def test_a_whole_tensor_of_something_else_is_partial_and_scattered_elements_are_numerics() -> None:
    assert found({**NEW, "d": np.zeros_like(NEW["d"])}) == "partial: tensor d of 4 of no known version"
    scattered = NEW["d"].copy()
    scattered.reshape(-1)[::4] += 1
    assert found({**NEW, "d": scattered}) == "numerics: 12 elements of tensor d are of no known version"


def test_an_update_of_one_element_that_was_not_applied_is_never_applied() -> None:
    """And no accident of the memory, although only a few bits differ."""
    new = {name: array.copy() for name, array in OLD.items()}
    new["a"][0, 0] += 1
    finding = compare(weights(**OLD).values(), weights(**new), weights(**OLD))
    assert finding is not None and finding.diagnosis is Diagnosis.NEVER_APPLIED


def test_f74_tied_tensors_may_be_held_under_one_name() -> None:
    tied = {**NEW, "head": NEW["a"]}
    assert compare(weights(**NEW).values(), weights(**tied), None) is None
    assert compare(weights(**tied).values(), weights(**NEW), None) is None
    stale = {**NEW, "head": OLD["a"]}
    finding = compare(weights(**stale).values(), weights(**tied), weights(**{**OLD, "head": OLD["a"]}))
    assert finding is not None and finding.diagnosis is Diagnosis.PARTIAL


# ── other dtypes ──

SPECIAL = [0.0, -0.0, 1.0, 1.00390625, 1.01171875, 65504.0, 65520.0, 1e-8, 3e38, np.inf, -np.inf, np.nan, 2.0**-133]


def rounded(values: Array, dtype: str) -> Array:
    tensor = as_dtype(of_array("a", values), dtype)
    assert tensor.dtype == dtype and tensor.shape == values.shape
    return tensor.data


@pytest.mark.parametrize(("name", "torch_name"), [("BF16", "bfloat16"), ("F16", "float16"), ("F32", "float32")])
def test_rounding_is_that_of_torch_to_the_bit(name: str, torch_name: str) -> None:
    import torch

    values = np.concatenate([np.array(SPECIAL, np.float32), noise(2000), noise(2000) * 1e-5, noise(100) * 1e38])
    wanted = torch.from_numpy(values).to(getattr(torch, torch_name))
    nan = np.isnan(values)
    size = wanted.element_size()
    ours = rounded(values, name).reshape(-1, size)
    theirs = wanted.view(torch.uint8).numpy().reshape(-1, size)
    assert np.array_equal(ours[~nan], theirs[~nan])
    narrow = Tensor("a", name, values.shape, rounded(values, name))
    back = as_dtype(narrow, "F32").data.view(np.float32)
    assert np.array_equal(back, wanted.float().numpy(), equal_nan=True)


def test_an_engine_in_a_coarser_dtype_is_held_against_the_rounded_file() -> None:
    held = [as_dtype(tensor, "BF16") for tensor in weights(**NEW).values()]
    assert compare(held, weights(**NEW), weights(**OLD)) is None
    late = [as_dtype(tensor, "BF16") for tensor in weights(**OLD).values()]
    finding = compare(late, weights(**NEW), weights(**OLD))
    assert finding is not None and finding.diagnosis is Diagnosis.NEVER_APPLIED
