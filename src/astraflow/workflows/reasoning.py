"""Tasks of the package ``reasoning-gym``: any of its families as a task source, all made on this machine."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from astraflow.rewards.reasoning import SIZE, dataset
from astraflow.tasks.generated import GeneratedTasks
from astraflow.types import Task


def reasoning_tasks(family: str, *, size: int = 1_000_000, seed: int = 0, **config: Any) -> GeneratedTasks:
    """``config``: the family's own settings. Payload: family, config, seed, index, question.

    Equal questions have equal keys, so that a split by key never trains on a held-out question.
    Raises ConfigError for an unknown family or setting.
    """
    wanted = msgspec.json.encode(config)
    data = dataset(family, wanted, seed)

    def make(index: int) -> Task:
        entry = data[index]
        same = hashlib.blake2b(entry["question"].encode(), digest_size=8).hexdigest()
        return Task(
            key=f"{family}/{same}",
            payload={
                "family": family,
                "config": config,
                "seed": seed,
                "index": index,
                "question": entry["question"],
            },
        )

    return GeneratedTasks(family, make, size=min(size, SIZE))
