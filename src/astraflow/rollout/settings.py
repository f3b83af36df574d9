"""Settings of the rollout service."""

from __future__ import annotations

from dataclasses import dataclass, field

from astraflow.errors import ConfigError
from astraflow.types import Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeLimits:
    """How large an episode's tree of agents may grow. What is refused, the workflow may catch and do without."""

    agents: int = 256
    """All of them together."""
    depth: int = 8
    """Generations of sub-agents below an agent of the workflow's own; 0: none."""
    children: int = 32
    """Sub-agents of one agent."""

    def __post_init__(self) -> None:
        for name, least in (("agents", 1), ("depth", 0), ("children", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"TreeLimits.{name} must be at least {least}, found {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSettings:
    """How one rollout service plays episodes. Durations in seconds."""

    slots: int = 64
    """Episodes played at once; as many leases are held."""
    sampling: Sampling = field(default_factory=Sampling)
    """Of training episodes; ``seed`` is ignored: every call gets its own from the lease."""
    eval_sampling: Sampling | None = None
    """Of evaluation episodes; None: ``sampling`` with temperature 0."""
    role_sampling: dict[str, Sampling] = field(default_factory=dict)
    """Roles whose training episodes are sampled otherwise."""
    max_turns: int = 64
    """Replies of one episode, all agents together; asking for more ends it as truncated."""
    tree: TreeLimits = field(default_factory=TreeLimits)
    """Of the agents of one episode."""
    lease_wait_s: float = 5.0
    """Long poll for a lease."""
    drain_grace_s: float = 10.0
    """How long running episodes may go on after a stop before they are handed back."""
    cancel_grace_s: float = 5.0
    """How long a cancelled workflow may take to end before its slot is taken from it."""
    block_limit_s: float = 30.0
    """How long a workflow may block the event loop before its episode is failed(timeout) and the process ended; at most
    the episode's time limit."""
    patience_s: float = 120.0
    """How long dataflow may be out of reach, or a version's weights fail to come, before the service gives up."""

    def __post_init__(self) -> None:
        for name in ("slots", "max_turns"):
            if getattr(self, name) < 1:
                raise ConfigError(f"RolloutSettings.{name} must be at least 1, found {getattr(self, name)}")
        for name in ("lease_wait_s", "drain_grace_s", "cancel_grace_s", "block_limit_s", "patience_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"RolloutSettings.{name} must be in [0, inf) seconds, found {getattr(self, name)}")
        for role, sampling in (("", self.sampling), *self.role_sampling.items()):
            if sampling.temperature == 0:
                raise ConfigError(
                    f"RolloutSettings: training sampling{' of ' + role if role else ''} has temperature 0; "
                    "greedy replies are for evaluation only"
                )
