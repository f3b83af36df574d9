"""Every declared float of a record is finite: NaN is never a reward, infinity never a wait (F93).

Arrays are not touched: they carry their bits, and records with array rules check them themselves.
"""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Callable
from typing import Any

import msgspec

from astraflow.errors import InvalidRecord

Check = Callable[[Any], str | None]
"""Path of the first float that is not finite, below the value given; None if there is none."""


def require_finite(record: msgspec.Struct) -> None:
    """Raise InvalidRecord with the path of the first float that is NaN or infinite."""
    check = _of_struct(type(record))
    found = check(record) if check else None
    if found is not None:
        raise InvalidRecord(f"{type(record).__name__}{found} must be finite, found NaN or infinity")


@functools.cache
def _of_struct(cls: type[msgspec.Struct]) -> Check | None:
    checks = [(f.name, check) for f in msgspec.structs.fields(cls) if (check := _of_type(f.type)) is not None]
    if not checks:
        return None

    def struct(value: Any) -> str | None:
        for name, check in checks:
            found = check(getattr(value, name))
            if found is not None:
                return f".{name}{found}"
        return None

    return struct


def _of_type(kind: Any) -> Check | None:
    if kind is float:
        return _number
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        inner = [check for arg in args if (check := _of_type(arg)) is not None]
        return _optional(inner[0]) if inner else None
    if origin in (tuple, list):
        check = _of_type(args[0])
        return _sequence(check) if check else None
    if origin is dict:
        check = _of_type(args[1])
        return _mapping(check) if check else None
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _of_struct(kind)
    return None


def _number(value: Any) -> str | None:
    return None if math.isfinite(value) else ""


def _optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _sequence(check: Check) -> Check:
    def sequence(values: Any) -> str | None:
        for index, value in enumerate(values):
            found = check(value)
            if found is not None:
                return f"[{index}]{found}"
        return None

    return sequence


def _mapping(check: Check) -> Check:
    def mapping(values: Any) -> str | None:
        for key, value in values.items():
            found = check(value)
            if found is not None:
                return f"[{str(key)[:128]!r}]{found}"
        return None

    return mapping
