"""What a task is, as 32 bytes: equal exactly when every field is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec
import numpy as np

from astraflow.types import Task

_ENCODER = msgspec.msgpack.Encoder(order="deterministic")


def task_digest(task: Task) -> bytes:
    """SHA-256 over all fields; the order of a payload's keys does not matter."""
    features = [
        (name, array.dtype.str, list(array.shape), np.ascontiguousarray(array).tobytes())
        for name, array in sorted(task.features.items())
    ]
    fields = (task.key, task.dataset, task.workflow, task.payload, features)
    return hashlib.sha256(_ENCODER.encode(fields)).digest()


def combined(*parts: object) -> str:
    """One hex digest of msgpack values, in order."""
    return hashlib.sha256(_ENCODER.encode(parts)).hexdigest()


def tasks_digest(tasks: Iterable[Task]) -> str:
    whole = hashlib.sha256()
    for task in tasks:
        whole.update(task_digest(task))
    return whole.hexdigest()


def key_fraction(key: str, *, salt: str = "") -> float:
    """Where a key lies in [0, 1): a function of its characters alone, the same in every process (F70)."""
    raw = hashlib.sha256(f"{salt}\0{key}".encode()).digest()
    return float(int.from_bytes(raw[:8], "big") >> 11) * 2.0**-53
