"""Equality of records that hold arrays: same values, same dtype, same shape, same bits."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np


def assert_same(found: Any, expected: Any, where: str = "$") -> None:
    assert type(found) is type(expected), where
    if isinstance(expected, msgspec.Struct):
        for name in expected.__struct_fields__:
            assert_same(getattr(found, name), getattr(expected, name), f"{where}.{name}")
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype and found.shape == expected.shape, where
        assert found.tobytes() == expected.tobytes(), where
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, tuple | list):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_same(found[index], value, f"{where}[{index}]")
    else:
        assert found == expected, where
