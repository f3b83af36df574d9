"""Weights in memory for the tests of deltas."""

from __future__ import annotations

from typing import Any

import numpy as np

from astraflow.types import Array
from astraflow.weights.tensors import Tensor, of_array

Weights = dict[str, Any]
DTYPES = ("u2", "f2", "f4", "f8", "i1", "u1", "i2", "i4", "u4", "i8", "u8")


def bf16(values: Array) -> Array:
    """uint16 of the bits, rounded to zero."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def weights(seed: int = 0, *, rows: int = 64) -> Weights:
    """A handful of tensors, most of them bf16; the last is tied to the first."""
    rng = np.random.default_rng(seed)
    found: Weights = {
        "embed": bf16(rng.normal(size=(rows, 32)) * 0.02),
        "layer.0.w": bf16(rng.normal(size=(32, 32)) * 0.02),
        "layer.0.norm": np.ones(32, np.float32),
        "layer.1.w": rng.normal(size=(32, 16)).astype(np.float16),
        "steps": np.array(7, np.int64),
        "empty": np.empty((0, 4), np.float32),
    }
    found["head"] = found["embed"]
    return found


def copy(found: Weights) -> Weights:
    """Of its own memory; what was tied stays tied."""
    own: dict[int, Any] = {}
    return {name: own.setdefault(id(array), array.copy()) for name, array in found.items()}


def nudge(found: Weights, *, share: float = 0.02, seed: int = 1, least: int = 1) -> Weights:
    """A copy in which about ``share`` of each tensor's elements have moved by one or two units of their last bit."""
    rng = np.random.default_rng(seed)
    new = copy(found)
    for array in {id(each): each for each in new.values()}.values():
        bits = array.reshape(-1).view(f"u{array.itemsize}")
        count = min(len(bits), max(least, int(len(bits) * share)))
        where = rng.choice(len(bits), count, replace=False) if len(bits) else np.empty(0, np.int64)
        bits[where] += rng.choice(np.array([1, 2, -1, -2]), len(where)).astype(bits.dtype)
    return new


def same(one: Weights, two: Weights) -> bool:
    """To the bit."""
    return one.keys() == two.keys() and all(_bits(one[name]) == _bits(two[name]) for name in one)


def _bits(array: Any) -> tuple[Any, ...]:
    tensor = array if isinstance(array, Tensor) else of_array("", array)
    return (tensor.dtype, tensor.shape, tensor.data.tobytes())


def moved(size: int, *, lr: float = 3e-6, seed: int = 0) -> tuple[Weights, Weights]:
    """Two bf16 tensors before and after each element moved by about ``lr``: the small ones change more often."""
    rng = np.random.default_rng(seed)
    base, new = {}, {}
    for name in ("a", "b"):
        masters = rng.normal(size=size) * 0.05
        base[name] = of_array(name, bf16(masters), dtype="BF16")
        new[name] = of_array(name, bf16(masters + rng.normal(size=size) * lr), dtype="BF16")
    return base, new
