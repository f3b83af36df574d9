"""Settings of another type than they are declared: which one, what was found, and the line of the recipe.

``Recipe(steps="20")`` is no error of Python's; it becomes one somewhere else, in words of somewhere else.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType, UnionType
from typing import Any

import msgspec

from astraflow.errors import ConfigError
from astraflow.run.overrides import is_node

LONGEST = 60


def require_types(root: Any, function: Callable[..., Any]) -> None:
    """Raises ConfigError for the first setting below ``root``, which ``function`` has made, that is of another type."""
    for node, name, words in _wrong(root, type(root).__name__):
        raise ConfigError(f"{words}{_line_of(function, type(node).__name__, name)}")


def wrong_in(error: BaseException) -> str:
    """Of settings that broke off while they checked themselves: which of them is of another type; empty: none is."""
    for node in _settings_that_raised(error.__traceback__):
        for owner, _, words in _wrong(node, type(node).__name__):
            if owner is node:
                return words
    return ""


def _settings_that_raised(trace: TracebackType | None) -> Iterator[Any]:
    while trace is not None:
        found = trace.tb_frame.f_locals.get("self") if trace.tb_frame.f_code.co_name == "__post_init__" else None
        if found is not None and _is_ours(found):
            yield found
        trace = trace.tb_next


def _wrong(node: Any, path: str) -> Iterator[tuple[Any, str, str]]:
    """(owner, field, in words), depth first."""
    hints = typing.get_type_hints(type(node))
    for name in _fields(node):
        value, here = getattr(node, name, None), f"{path}.{name}"
        if not fits(value, hints[name]):
            yield node, name, f"{here} must be {_shown(hints[name])}, found {_short(value)} ({type(value).__name__})"
            continue
        below = value.items() if isinstance(value, Mapping) else [(None, value)]
        for key, each in below:
            if _is_ours(each):
                yield from _wrong(each, here if key is None else f"{here}[{key!r}]")


def _is_ours(value: Any) -> bool:
    """Settings whose declarations are ours to answer for."""
    is_settings = is_node(value) and not isinstance(value, Mapping)
    return is_settings and type(value).__module__.partition(".")[0] == "astraflow"


def _fields(node: Any) -> list[str]:
    if isinstance(node, msgspec.Struct):
        return list(node.__struct_fields__)
    return [field.name for field in dataclasses.fields(node)]


def fits(value: Any, hint: Any) -> bool:
    """As Python's own use of it would see it: a list is as good as a tuple, an int as a float, never a bool as an int.
    What cannot be judged fits."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        return any(fits(value, part) for part in parts)
    if origin is typing.Literal:
        return value in parts
    if origin is dict:
        return isinstance(value, Mapping) and all(fits(k, parts[0]) and fits(v, parts[1]) for k, v in value.items())
    if origin in (tuple, list):
        each = [part for part in parts if part is not Ellipsis]
        return isinstance(value, list | tuple) and (len(each) != 1 or all(fits(item, each[0]) for item in value))
    if origin is not None:
        return callable(value) if origin is typing.get_origin(Callable[[], Any]) else True
    if hint is None or hint is type(None):
        return value is None
    return _is_a(value, hint)


def _is_a(value: Any, hint: Any) -> bool:
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    if hint is Any or not isinstance(hint, type) or (getattr(hint, "_is_protocol", False) and not _can_ask(hint)):
        return True
    return isinstance(value, str if issubclass(hint, str) and issubclass(hint, Enum) else hint)


def _can_ask(protocol: Any) -> bool:
    return bool(getattr(protocol, "_is_runtime_protocol", False))


def _shown(hint: Any) -> str:
    if typing.get_origin(hint) in (typing.Union, UnionType):
        return " or ".join(_shown(part) for part in typing.get_args(hint))
    if hint is type(None):
        return "None"
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _line_of(function: Callable[..., Any], owner: str, name: str) -> str:
    """Where its file says ``Owner(name=…)``, if it does so once; else where the function begins."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        tree = ast.parse(Path(code.co_filename).read_text(encoding="utf-8"))
        calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call) and _called(each) == owner]
        found = [word.value.lineno for call in calls for word in call.keywords if word.arg == name]
        if len(found) == 1:
            return f" ({Path(code.co_filename).name}:{found[0]})"
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno} in {code.co_name})"


def _called(call: ast.Call) -> str:
    return getattr(call.func, "id", getattr(call.func, "attr", ""))
