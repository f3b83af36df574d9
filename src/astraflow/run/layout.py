"""The run folder: one way out. Every path of it is named here, every small file is written whole or not at all."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from astraflow.disk import absent_if_raises, writing
from astraflow.errors import ConfigError

CACHE = "cache-"
"""Begins the name of a folder that a worker has while it lives, then comes its name."""
COPY = "restore it from a copy"
ANOTHER = "name another folder by --run-dir"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run."""

    path: Path

    @property
    def database(self) -> Path:
        return self.path / "run.db"

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def tasks(self) -> Path:
        """Which tasks the run was started with."""
        return self.path / "tasks.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def trace(self) -> Path:
        return self.path / "trace.jsonl"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def payloads(self) -> Path:
        return self.path / "payloads"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def curve(self) -> Path:
        return self.path / "curve.png"

    @property
    def endpoint(self) -> Path:
        """Where dataflow listens: JSON with ``url`` and ``pid``; of the last start."""
        return self.path / "endpoint.json"

    @property
    def initial(self) -> Path:
        """Manifests of version 0, by policy."""
        return self.path / "initial.json"

    @property
    def name(self) -> str:
        return self.path.resolve().name  # of "." too

    def create(self) -> RunFolder:
        """Raises ConfigError when a run is already in it: nothing of an older run is ever picked up (F69)."""
        if self.config.exists() or self.database.exists():
            raise ConfigError(
                f"{self.path} already holds a run; 'astraflow resume {self.path}' goes on with it, "
                "or name another folder by --run-dir"
            )
        with writing(self.path, ANOTHER):
            for folder in (self.path, self.weights, self.checkpoints, self.logs, self.payloads):
                folder.mkdir(parents=True, exist_ok=True)
        return self

    def require(self) -> RunFolder:
        """Raises ConfigError where nobody began a run, or its config cannot be read."""
        self.stored_config()
        return self

    def stored_config(self) -> dict[str, Any]:
        """What its config.json holds. Raises ConfigError."""
        if not self.config.exists():
            raise ConfigError(f"{self.path} is no run folder: it has no config.json")
        stored = read_json(self.config)
        try:
            msgspec.convert(stored, _Stored)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self.config} does not hold a run's config: {error}; {COPY}") from error
        return stored

    def url(self) -> str:
        """Raises ConfigError unless a dataflow has ever listened for this run."""
        again = f"'astraflow resume {self.path}' writes it anew"
        found = read_json(self.endpoint, mend=again).get("url") if self.endpoint.exists() else None
        if found is not None and not isinstance(found, str):
            raise ConfigError(f"{self.endpoint} holds no URL of a dataflow, found {found!r}; {again}")
        if found is None:
            raise ConfigError(f"{self.path} has no running dataflow; 'astraflow resume {self.path}' starts one")
        return found


def new_run_folder(root: Path, name: str) -> RunFolder:
    """``root/name-001`` and so on: the first number that is free."""
    taken = [0]
    if root.is_dir():
        pattern = re.compile(re.escape(name) + r"-(\d+)")
        taken += [int(found[1]) for each in root.iterdir() if (found := pattern.fullmatch(each.name))]
    return RunFolder(root / f"{name}-{max(taken) + 1:03d}")


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    text = json.dumps(value, indent=2, allow_nan=False)
    with writing(path), absent_if_raises(partial):
        with partial.open("w", encoding="utf-8") as file:
            file.write(f"{text}\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)


def read_json(path: Path, *, mend: str = COPY) -> dict[str, Any]:
    """An object. Raises ConfigError: which file, what is wrong with it, and how to ``mend`` it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing; {mend}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # neither JSON nor, perhaps, text
        raise ConfigError(f"{path} is not JSON: {error}; {mend}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, found {type(value).__name__}; {mend}")
    return value


class _Stored(msgspec.Struct):
    """Of config.json, as far as it is there: ``Resolved.as_file``."""

    recipe: str = ""
    set: list[str] = []
    seed: int | None = None
    digest: str = ""
    code_digest: str = ""
    config: dict[str, Any] = {}
