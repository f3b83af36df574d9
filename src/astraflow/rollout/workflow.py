"""What a user writes: an async callable ``(task, agents) -> Reward`` that plays one task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from astraflow.types import StopReason, Task

Message = Mapping[str, Any]
"""``{"role": "user", "content": "..."}`` and whatever else the chat template reads."""


class _Unsaid(Enum):
    UNSAID = "unsaid"


class Reward:
    """Rewards of one episode: ``Reward(solver=1.0, verifier=0.0)``, ``Reward(1.0)`` for every role, or per turn.

    Values are float or None; None is "not scored" (no baseline, no gradient), never zero: ``Reward(None)`` says it of
    every role, ``Reward()`` nothing of any. ``turns`` maps a turn's index (``Reply.turn``) to its own reward, which
    then replaces the role's. ``baseline_keys`` does the same for what it is compared with. ``features`` are numbers for
    data algorithms: ``format`` (1 well formed, 0 not), ``without/ROLE`` (what the episode's score would have been had
    the role done nothing), or of your own.
    """

    def __init__(
        self,
        episode: float | _Unsaid | None = _Unsaid.UNSAID,
        /,
        *,
        turns: Mapping[int, float | None] | None = None,
        baseline_keys: Mapping[int, str] | None = None,
        features: Mapping[str, Any] | None = None,
        **roles: float | None,
    ) -> None:
        self.episode = None if isinstance(episode, _Unsaid) else episode
        self.is_for_all = not isinstance(episode, _Unsaid)
        """Also a role that is not named has its value, which may be None."""
        self.roles = dict(roles)
        self.turns = dict(turns or {})
        self.baseline_keys = dict(baseline_keys or {})
        self.features = dict(features or {})


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """One reply of an agent."""

    text: str
    turn: int
    stop_reason: StopReason
    tokens: tuple[int, ...]
    tool_calls: tuple[Mapping[str, Any], ...] = field(default=())

    @property
    def truncated(self) -> bool:
        return self.stop_reason is StopReason.LENGTH


class Agent(Protocol):
    """One agent of the episode; recording is automatic and token-exact."""

    async def chat(self, messages: Sequence[Message], *, max_tokens: int | None = None) -> Reply:
        """The next reply to this history. A history that extends an earlier one of this agent continues its sample."""

    def spawn(self, role: str) -> Agent:
        """A sub-agent of the role, child of this agent's latest turn, which may spawn in its turn. Raises SpawnRefused
        at the recipe's limits of depth, children and agents: who catches it goes on without, else the episode ends as
        truncated."""


class Agents(Protocol):
    def __getitem__(self, role: str) -> Agent:
        """The role's first agent. Raises KeyError with the known roles."""

    def spawn(self, role: str) -> Agent:
        """A further agent of the role, child of the latest turn. Raises SpawnRefused at the limit of agents."""


class Workflow(Protocol):
    async def __call__(self, task: Task, agents: Agents) -> Reward: ...
