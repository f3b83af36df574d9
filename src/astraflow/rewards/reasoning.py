"""Grades by the verifiers of the package ``reasoning-gym``; imported only where a recipe uses them.

A task names (family, config, seed, index): the entry with its hidden answer is made again from that, so that whatever
the verifier needs never crosses the wire.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec

from astraflow.errors import ConfigError, GraderFailed
from astraflow.rewards.answer import final_answer
from astraflow.types import Task

SIZE = 2**31 - 1
"""Virtual size of a family's data set: an index below it is made when it is asked for."""


class ReasoningGrade:
    """``(text, task) → score``: what ``extract`` finds in the reply, judged by the family's own verifier.

    ``threshold``: None keeps the verifier's partial credit, else a score below it is 0 and any other 1.
    """

    def __init__(self, *, extract: Callable[[str], str | None] = final_answer, threshold: float | None = None) -> None:
        self._extract = extract
        self._threshold = threshold

    def __call__(self, text: str, task: Task) -> float:
        answer = self._extract(text)
        if not answer:
            return 0.0
        source = task.payload
        data = dataset(source["family"], msgspec.json.encode(source["config"]), source["seed"])
        entry = data[source["index"]]
        if entry["question"] != source["question"]:
            raise GraderFailed(f"{task.key}: another version of reasoning-gym made this task")
        score = float(data.score_answer(answer, entry))
        if not math.isfinite(score):
            raise GraderFailed(f"{task.key}: the verifier gave {score}")
        return score if self._threshold is None else float(score >= self._threshold)


@lru_cache(maxsize=256)
def dataset(family: str, config: bytes, seed: int) -> Any:
    """The package's data set. ``config`` is JSON. Raises ConfigError naming the family or the setting."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError("reasoning-gym is not installed: pip install 'astraflow[examples]'") from error
    if family not in DATASETS:
        raise ConfigError(f"reasoning-gym has no family {family!r}; known: {', '.join(sorted(DATASETS))}")
    try:
        return reasoning_gym.create_dataset(family, size=SIZE, seed=seed, **msgspec.json.decode(config))
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(f"reasoning-gym family {family!r} refuses {config.decode()}: {error}") from error
