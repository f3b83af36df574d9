"""``--set path=value``: one-off changes to a recipe, strict. An unknown path names the nearest known one (F97)."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from astraflow.algorithms.pipeline import Pipeline
from astraflow.errors import AstraFlowError, ConfigError
from astraflow.run.tiny_model import TinyModel


def apply_overrides(root: Any, settings: Sequence[str]) -> Any:
    """A changed copy of ``root`` (frozen dataclasses, msgspec structs and dicts of them). Raises ConfigError."""
    for setting in settings:
        path, sign, text = setting.partition("=")
        if not sign or not path.strip():
            raise ConfigError(f"--set {setting!r} must be path=value, for example --set steps=20")
        root = _set(root, root, tuple(path.strip().split(".")), _parse(text), setting)
    return root


def settable_paths(root: Any) -> Iterator[tuple[str, Any]]:
    """Every leaf (path, value) below ``root``."""
    yield from _leaves(root, ())


def is_node(value: Any) -> bool:
    """Whether a path may go on below this value. Pipelines and model builders are objects that a recipe composes."""
    if isinstance(value, type | Pipeline | TinyModel):
        return False
    return dataclasses.is_dataclass(value) or isinstance(value, msgspec.Struct | dict)


def _names(node: Any) -> list[str]:
    """Of a dict, or of an object or class of settings."""
    if isinstance(node, dict):
        return [str(key) for key in node]
    if hasattr(node, "__struct_fields__"):
        return list(node.__struct_fields__)
    return [field.name for field in dataclasses.fields(node) if field.init]


def _get(node: Any, name: str) -> Any:
    return node[name] if isinstance(node, dict) else getattr(node, name)


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name in _names(node):
        value = _get(node, name)
        if is_node(value) and _names(value):
            yield from _leaves(value, (*path, name))
        else:
            yield ".".join((*path, name)), value


def _parse(text: str) -> Any:
    """JSON where it is JSON, else the text itself (a path or a name needs no quotes)."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _set(root: Any, node: Any, path: tuple[str, ...], value: Any, setting: str, above: tuple[str, ...] = ()) -> Any:
    return _replace(node, {path[0]: _changed(root, node, path, value, setting, above)}, setting)


def _changed(root: Any, node: Any, path: tuple[str, ...], value: Any, setting: str, above: tuple[str, ...]) -> Any:
    """What becomes of ``path[0]``."""
    name, rest = path[0], path[1:]
    here = ".".join((*above, name))
    if name not in _names(node):
        raise ConfigError(
            f"--set {setting}: there is no setting {'.'.join((*above, *path))}{_nearest(root, above, path)}"
        )
    child = _get(node, name)
    if _is_open(node, name) and (len(rest) == 1 or isinstance(value, Mapping)):
        return {**child, **_convert(node, name, {rest[0]: value} if rest else value, setting)}
    if rest and not is_node(child):
        raise ConfigError(
            f"--set {setting}: {here} is a single value, it has no {'.'.join(rest)}{_nearest(root, above, path)}"
        )
    if rest:
        return _set(root, child, rest, value, setting, (*above, name))
    if is_node(child) and isinstance(value, Mapping):
        below = (*above, name)  # all at once: what is checked together may be changed together
        found = {key: _changed(root, child, (key,), each, setting, below) for key, each in _nested(value).items()}
        return _replace(child, found, setting)
    return _convert(node, name, value, setting)


def _nested(flat: Mapping[Any, Any]) -> dict[str, Any]:
    """Keys without dots: ``{"a.b": 1, "a.c": 2}`` is ``{"a": {"b": 1, "c": 2}}``."""
    found: dict[str, Any] = {}
    for key, each in flat.items():
        head, _, rest = str(key).partition(".")
        value = {rest: each} if rest else each
        both = isinstance(found.get(head), Mapping) and isinstance(value, Mapping)
        found[head] = {**found[head], **value} if both else value
    return found


def _is_open(node: Any, name: str) -> bool:
    """A dict of plain values, whose keys are free: what reads them checks them."""
    kind = None if isinstance(node, dict) else typing.get_type_hints(type(node))[name]
    return typing.get_origin(kind) is dict and _is_plain(kind)


def _convert(node: Any, name: str, value: Any, setting: str) -> Any:
    kind = type(_get(node, name)) if isinstance(node, dict) else typing.get_type_hints(type(node))[name]
    if callable(_get(node, name)) and not isinstance(value, str):
        raise ConfigError(f"--set {setting}: {name} is an object that only the recipe can change")
    if value is None and type(None) in typing.get_args(kind):
        return None
    plain = _plain_type(kind)
    if plain is None:
        raise ConfigError(f"--set {setting}: {name} is an object that only the recipe can change")
    try:
        return msgspec.convert(value, plain, strict=isinstance(value, bool))
    except (msgspec.ValidationError, TypeError) as error:
        raise ConfigError(f"--set {setting}: {error}{_known_values(plain)}") from error


def _known_values(kind: Any) -> str:
    """What a name may be, where there are only a few."""
    is_literal = typing.get_origin(kind) is typing.Literal
    return f"; known: {', '.join(str(value) for value in typing.get_args(kind))}" if is_literal else ""


def _plain_type(kind: Any) -> Any:
    """The part of an annotation that text can express; None if there is none."""
    options = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, _UNION) else (kind,)
    plain = [option for option in options if _is_plain(option)]
    return typing.Union[tuple(plain)] if (plain and plain != [type(None)]) or kind is type(None) else None  # noqa: UP007


_UNION = type(int | str)


def _is_plain(option: Any) -> bool:
    if option in (int, float, str, bool, type(None)):
        return True
    origin = typing.get_origin(option)
    if origin is typing.Literal:
        return True
    if origin in (tuple, list, dict, typing.Union, _UNION):
        return all(_is_plain(arg) for arg in typing.get_args(option) if arg is not Ellipsis)
    return isinstance(option, type) and issubclass(option, str)  # a StrEnum


def _replace(node: Any, changes: Mapping[str, Any], setting: str) -> Any:
    change: Callable[..., Any] = msgspec.structs.replace if isinstance(node, msgspec.Struct) else dataclasses.replace
    if isinstance(node, dict):
        return {**node, **changes}
    try:
        return change(node, **changes)
    except AstraFlowError as error:
        raise ConfigError(f"--set {setting}: {error}") from error


def _nearest(root: Any, above: tuple[str, ...], path: tuple[str, ...]) -> str:
    """By the whole path, or by the last name alone at any level (a key at the wrong level)."""
    wanted = ".".join((*above, *path))
    known = [name for name, _ in settable_paths(root)]
    same = [name for name in known if name.rpartition(".")[2] == path[-1]]
    if same:
        return f"; did you mean {' or '.join(sorted(same)[:3])}?"
    leaves = {name.rpartition(".")[2] for name in known}
    leaf = difflib.get_close_matches(path[-1], sorted(leaves), n=1, cutoff=0.6)
    if leaf:
        candidates = [name for name in known if name.rpartition(".")[2] == leaf[0]]
        return f"; did you mean {difflib.get_close_matches(wanted, candidates, n=1, cutoff=0.0)[0]}?"
    whole = difflib.get_close_matches(wanted, known, n=1, cutoff=0.5)
    return f"; did you mean {whole[0]}?" if whole else "; 'astraflow plan RECIPE' lists every setting"


_KEYWORD = re.compile(r"(?:(\w+)\.__init__\(\) got an u|U)nexpected keyword argument '(\w+)'")


def nearest_keyword(error: Exception, names: Mapping[str, Any]) -> str:
    """For a recipe that misspelt a setting of an object that it makes: what was meant. ``names``: of its module."""
    found = _KEYWORD.search(str(error)) if isinstance(error, TypeError) else None
    if found is None:
        return ""
    kinds = [kind for kind in names.values() if isinstance(kind, type) and is_settings(kind)]
    own = [kind for kind in kinds if kind.__name__ == found[1]] or kinds
    known = sorted({name for kind in own for name in _names(kind)})
    near = difflib.get_close_matches(found[2], known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}" if found[1] else ""


def is_settings(kind: type) -> bool:
    """Whether its fields are settings."""
    return dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct)
