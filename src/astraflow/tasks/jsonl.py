"""A file with one JSON object a line. Read and checked once, when the recipe is resolved, before anything starts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from astraflow.errors import ConfigError
from astraflow.tasks.digest import combined
from astraflow.tasks.lists import in_range
from astraflow.types import Task


class JsonlTasks:
    """Every field of a line becomes the payload of one task; blank lines are skipped.

    ``key`` names the field that holds a row's key (a string or an integer). Without it the key is a hash of the row's
    content, so the same row has the same key wherever it stands in the file. ``require`` names fields that every row
    must have, not null. Raises ConfigError with file, line and what to do.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        name: str | None = None,
        key: str | None = None,
        workflow: str = "",
        require: Sequence[str] = (),
    ) -> None:
        self._path = Path(path)
        self._name = name or self._path.stem
        self._workflow = workflow
        self._key = key
        raw = _read(self._path)
        self._lines: list[bytes] = []
        self._keys: list[str] = []
        seen: dict[str, int] = {}
        for number, line in enumerate(raw.split(b"\n"), start=1):
            if not line.strip():
                continue
            where = f"{self._path}:{number}"
            row = _row(line, where, require)
            row_key = _key_of(row, key, where)
            if row_key in seen:
                raise ConfigError(
                    f"{where} has the key {row_key!r} of line {seen[row_key]}; keys must be unique: "
                    f"{'change one of them' if key else 'remove one of the equal rows'}"
                )
            seen[row_key] = number
            self._lines.append(line)
            self._keys.append(row_key)
        if not self._lines:
            raise ConfigError(f"{self._path} has no rows; write one JSON object a line")
        self._digest = combined("jsonl", self._name, key, workflow, hashlib.sha256(raw).hexdigest())

    @property
    def name(self) -> str:
        return self._name

    @property
    def size(self) -> int:
        return len(self._lines)

    def task(self, index: int) -> Task:
        at = in_range(index, self.size, self._name)
        payload = msgspec.json.decode(self._lines[at], type=dict[str, Any])
        return Task(key=self._keys[at], dataset=self._name, payload=payload, workflow=self._workflow)

    def digest(self) -> str:
        return self._digest


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise ConfigError(f"cannot read tasks from {path}: {error.strerror}; check the path") from error


def _row(line: bytes, where: str, require: Sequence[str]) -> dict[str, Any]:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} is not JSON ({error}); fix or remove the line, one JSON object a line") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where} holds a JSON {type(row).__name__}; write one JSON object a line")
    missing = [name for name in require if row.get(name) is None]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(map(repr, missing))}; it has {', '.join(map(repr, row))}")
    try:
        msgspec.msgpack.encode(row)
    except OverflowError as error:
        raise ConfigError(f"{where} holds an integer beyond 64 bits; write it as a string") from error
    return row


def _key_of(row: dict[str, Any], key: str | None, where: str) -> str:
    if key is None:
        content = msgspec.json.encode(row, order="deterministic")
        return hashlib.sha256(content).hexdigest()[:16]
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ConfigError(f"{where} needs a string or an integer in {key!r}, its key, found {value!r}")
    return str(value)
