"""Workflows whose agents say what a table tells them to: one engine per role, its replies in the order of asking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from astraflow.engines.base import EngineInfo, GenerateReply, GenerateRequest
from astraflow.rollout.agents import Seat
from astraflow.rollout.play import WorkflowPlayer
from astraflow.rollout.settings import TreeLimits
from astraflow.testing.check_workflow import character_template
from astraflow.testing.virtual_loop import run_virtual
from astraflow.types import Episode, Lease, Manifest, Sampling, Span, StopReason, Task

TEMPLATE = character_template()
TASK = Task(key="t", payload={"prompt": "1 + 1?", "answer": "2"})
"""Right is ``2`` (rewards.exact.Exact)."""


class Saying:
    """Says its texts one after the other; keeps the prompts that it was asked with."""

    def __init__(self, role: str, texts: Sequence[str]) -> None:
        self.prompts: list[str] = []
        self._role = role
        self._texts = list(texts)

    def info(self) -> EngineInfo:
        return EngineInfo(policy=self._role, max_context=65536, vocabulary=200, dtype="float32", versions=(0,), slots=8)

    async def start(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self.prompts.append(TEMPLATE.decode(request.tokens.tolist()))
        assert self._texts, f"{self._role} was asked once more than the table says: {self.prompts[-1]}"
        ids = TEMPLATE.encode_reply(self._texts.pop(0))
        ids.append(TEMPLATE.eos_id)  # type: ignore[arg-type]
        return GenerateReply(
            tokens=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -0.1, np.float32),
            spans=(Span(start=0, stop=len(ids), version=0, digest="d"),),
            stop_reason=StopReason.STOP,
        )

    async def load(self, manifest: Manifest, files: list[Path]) -> None: ...

    async def close(self) -> None: ...

    @property
    def left(self) -> list[str]:
        return self._texts


@dataclass(frozen=True)
class Played:
    episode: Episode
    prompts: dict[str, list[str]]

    def rewards(self, role: str) -> list[float | None]:
        """Of the role's turns in the order of asking."""
        return [turn.reward for turn in self._turns(role)]

    def keys(self, role: str) -> list[str]:
        return [turn.baseline_key for turn in self._turns(role)]

    def _turns(self, role: str) -> list[Any]:
        turns = [turn for each in self.episode.trajectories if each.role == role for turn in each.turns]
        return sorted(turns, key=lambda turn: turn.index)


def played(
    workflow: Any, says: Mapping[str, Sequence[str]], *, task: Task = TASK, tree: TreeLimits | None = None
) -> Played:
    """Everything in the table must have been said."""
    engines = {role: Saying(role, texts) for role, texts in says.items()}
    seats = {
        role: Seat(policy=role, engine=engine, template=TEMPLATE, sampling=Sampling(max_tokens=200))
        for role, engine in engines.items()
    }
    player = WorkflowPlayer(workflow=workflow, seats=seats, tree=tree or TreeLimits())
    episode = run_virtual(lambda: player(Lease(group=1, index=0, attempt=1, task=task, seed=3)))
    assert episode.failure is None, episode.error
    assert not any(engine.left for engine in engines.values()), {r: e.left for r, e in engines.items() if e.left}
    return Played(episode, {role: engine.prompts for role, engine in engines.items()})
