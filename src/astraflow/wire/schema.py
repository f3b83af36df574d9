"""The wire's schema as data, so that a change which an older program could not read is seen before it is merged.

``schema.v1.json`` beside this file is what has been promised; ``python -m astraflow.wire.schema`` writes it anew after
an addition. Removing, renaming or retyping is never right: make a new field, or a new version of the path.
"""

from __future__ import annotations

import inspect
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from astraflow import types as data
from astraflow.types import Record
from astraflow.wire import calls, codec, messages

PATH = Path(__file__).with_name("schema.v1.json")

Schema = dict[str, Any]


def records() -> dict[str, type[Record]]:
    """Every record that may cross a process boundary, by name."""
    every = {name: value for module in (data, messages, calls) for name, value in vars(module).items()}
    found = {n: v for n, v in every.items() if inspect.isclass(v) and issubclass(v, Record) and v is not Record}
    return dict(sorted(found.items()))


def describe() -> Schema:
    """The schema of the code as it is now."""
    return {
        "version": 1,
        "arrays": {str(code): dtype for code, dtype in codec.DTYPES.items()},
        "calls": {c.name: [c.request.__name__, c.reply.__name__] for c in (*calls.CALLS.values(), calls.MANY)},
        "enums": {name: sorted(str(v.value) for v in kind) for name, kind in sorted(_enums().items())},
        "records": {name: _describe_record(kind) for name, kind in records().items()},
    }


def breaks(old: Schema, new: Schema) -> list[str]:
    """What a program of schema ``old`` could not read from one of schema ``new``, one sentence each."""
    found = []
    for section in ("arrays", "calls"):
        for name, value in old[section].items():
            if new[section].get(name) != value:
                found.append(f"{section}: {name} was {value}, is {new[section].get(name)}")
    for name, values in old["enums"].items():
        gone = set(values) - set(new["enums"].get(name, ()))
        if gone:
            found.append(f"enum {name} lost {sorted(gone)}")
    for name, record in old["records"].items():
        if name not in new["records"]:
            found.append(f"record {name} is gone")
        else:
            found += _record_breaks(name, record, new["records"][name])
    return found


def _record_breaks(name: str, old: Schema, new: Schema) -> list[str]:
    found = []
    if old["array_like"] != new["array_like"]:
        found.append(f"{name} changed between map and array")
    before, after = old["fields"], new["fields"]
    for field, was in before.items():
        now = after.get(field)
        if now is None:
            found.append(f"{name}.{field} is gone")
        elif now["type"] != was["type"]:
            found.append(f"{name}.{field} was {was['type']}, is {now['type']}")
        elif now["required"] and not was["required"]:
            found.append(f"{name}.{field} has lost its default")
    for field, now in after.items():
        if field not in before and now["required"]:
            found.append(f"{name}.{field} is new and has no default")
    if old["array_like"] and list(after)[: len(before)] != list(before):
        found.append(f"{name} is an array on the wire: new fields go to the end")
    return found


def _describe_record(kind: type[Record]) -> Schema:
    fields = {}
    for field in msgspec.structs.fields(kind):
        fields[field.encode_name] = {"type": _type_name(field.type), "required": field.required}
    return {"array_like": bool(kind.__struct_config__.array_like), "fields": fields}


def _enums() -> dict[str, type[Enum]]:
    return {n: v for n, v in vars(data).items() if inspect.isclass(v) and issubclass(v, Enum) and list(v)}


def _type_name(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type_name(arg) for arg in args)
    if origin is not None:
        return f"{origin.__name__}[{', '.join(_type_name(arg) for arg in args)}]"
    if kind is Ellipsis:
        return "..."
    return "None" if kind is type(None) else str(getattr(kind, "__name__", kind))


def write() -> None:
    """Write ``schema.v1.json``. RuntimeError if that would break what it has promised."""
    new = describe()
    broken = breaks(msgspec.json.decode(PATH.read_bytes()), new) if PATH.exists() else []
    if broken:
        raise RuntimeError("the wire only grows; these changes break it: " + "; ".join(broken))
    PATH.write_bytes(msgspec.json.format(msgspec.json.encode(new), indent=1) + b"\n")


if __name__ == "__main__":
    write()
