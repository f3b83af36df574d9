"""Settings of the dataflow service: what a run is, and the limits that it keeps. Each checks itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from astraflow.algorithms.checks import check_episodes
from astraflow.algorithms.pipeline import Pipeline
from astraflow.dataflow.autoscale import Scaling
from astraflow.errors import ConfigError
from astraflow.tasks.base import TaskSource


def _at_least(name: str, value: float, lowest: float) -> None:
    if not value >= lowest:
        raise ConfigError(f"{name} must be at least {lowest}, found {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySpec:
    """One named model of the run."""

    trainable: bool = True
    max_staleness: int = 1
    """Bound on (version that the step starts from) - (oldest version of a sample); 0 is on-policy."""
    groups_per_batch: int = 8
    steps: int | None = None
    """Committed versions at which it ends; None: the run's."""
    keep_every: int = 0
    """Every so many versions one stays in the store, to be played with later; 0: none."""
    average_of: str = ""
    """Not trained itself: its versions are a moving average of this policy's; empty: they are not."""

    def __post_init__(self) -> None:
        _at_least("PolicySpec.max_staleness", self.max_staleness, 0)
        _at_least("PolicySpec.groups_per_batch", self.groups_per_batch, 1)
        _at_least("PolicySpec.keep_every", self.keep_every, 0)
        if self.steps is not None:
            _at_least("PolicySpec.steps", self.steps, 0)

    @property
    def room(self) -> int:
        """How many kept groups can still be used before they are stale."""
        return (self.max_staleness + 1) * self.groups_per_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSpec:
    """The evaluation lane: the first ``count`` tasks of ``tasks``, ``episodes`` times each, at chosen versions."""

    tasks: TaskSource
    count: int
    every: int
    """Versions between two evaluations; 0: only at the start and the end."""
    episodes: int = 1
    at_start: bool = True
    at_end: bool = True
    policy: str = ""
    """Whose versions are evaluated; empty: the first trainable one, or the first."""
    passing: float = 1.0
    """Score from which an attempt has solved its task, for pass@k."""

    def __post_init__(self) -> None:
        _at_least("EvalSpec.count", self.count, 1)
        _at_least("EvalSpec.every", self.every, 0)
        check_episodes("EvalSpec.episodes", self.episodes)
        if self.tasks.size is not None and self.count > self.tasks.size:
            raise ConfigError(f"EvalSpec.count is {self.count}, but {self.tasks.name} has only {self.tasks.size} tasks")

    def due(self, version: int, *, steps: int) -> bool:
        """Whether this version is evaluated."""
        if version == 0:
            return self.at_start or (self.at_end and steps == 0)
        if version == steps:
            return self.at_end or (self.every > 0 and version % self.every == 0)
        return self.every > 0 and version % self.every == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """When dataflow stops waiting. Durations in seconds."""

    lease_ttl_s: float = 10.0
    heartbeat_s: float = 2.0
    dead_after_s: float = 10.0
    time_limit_s: float = 600.0
    """Of one episode, enforced by the worker; dataflow itself ends it ``grace_s`` later."""
    grace_s: float = 30.0
    max_attempts: int = 3
    """Failures of one episode after which it is given up; user code that raised is tried again once."""
    min_group: int | None = None
    """Members that must count, or the group is dropped; None: max(2, half its size)."""
    eval_share: float = 0.25
    """Of a worker's leases, while training episodes are pending."""
    no_signal_limit: int = 10
    """Batches in a row without signal after which the run is starved."""
    barren_groups: int = 256
    """Groups in a row that were not kept after which it is starved too; ``no_signal_limit`` batches of them if that
    is more. A reward that one sample in a thousand gets needs so many."""
    first_failures: int = 20
    """The run stops when its first episodes all fail in user code or by their time limit."""
    batch_failures: int = 3
    starved_after_s: float = 600.0
    """How long no worker may serve what the run needs, no trainer a batch, and Select choose none of the kept groups,
    before that is an error."""
    hung_after_s: float = 60.0
    """How long a process of the launcher may live unheard of (worker and trainer: from when they count as dead), before
    it is ended and started again."""
    when_starved: Literal["wait", "smaller_batch", "stop"] = "stop"
    """What is done when a policy cannot get a batch: wait where something may still come, cut what is kept, or fail."""
    retain: Literal["checkpoint", "all"] = "checkpoint"
    """Bytes of episodes and batches: kept until the oldest checkpoint covers them, or for ever."""

    def __post_init__(self) -> None:
        for name in ("lease_ttl_s", "heartbeat_s", "dead_after_s", "time_limit_s", "starved_after_s", "hung_after_s"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"Limits.{name} must be in (0, inf) seconds, found {value}")
        if not self.heartbeat_s * 2 <= min(self.lease_ttl_s, self.dead_after_s):
            raise ConfigError(
                f"Limits.heartbeat_s must be at most half of lease_ttl_s and dead_after_s, found {self.heartbeat_s}, "
                f"{self.lease_ttl_s}, {self.dead_after_s}: one lost heartbeat would end every lease"
            )
        _at_least("Limits.grace_s", self.grace_s, 0)
        for name in ("max_attempts", "no_signal_limit", "barren_groups", "first_failures", "batch_failures"):
            _at_least(f"Limits.{name}", getattr(self, name), 1)
        if self.min_group is not None:
            _at_least("Limits.min_group", self.min_group, 1)
        if self.retain not in ("checkpoint", "all"):
            raise ConfigError(f"Limits.retain must be 'checkpoint' or 'all', found {self.retain!r}")
        if self.when_starved not in ("wait", "smaller_batch", "stop"):
            raise ConfigError(
                f"Limits.when_starved must be 'wait', 'smaller_batch' or 'stop', found {self.when_starved!r}"
            )
        if not 0 < self.eval_share <= 1:
            raise ConfigError(f"Limits.eval_share must be in (0, 1], found {self.eval_share}")

    def counted_members(self, size: int) -> int:
        """How many members of a group must count, lest it is dropped."""
        if size == 1:
            return 1
        return min(size, max(2, (size + 1) // 2) if self.min_group is None else self.min_group)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """One run, as dataflow sees it."""

    run: str
    seed: int = 0
    steps: int
    """Committed versions at which a trainable policy ends that has no ``steps`` of its own."""
    policies: dict[str, PolicySpec]
    roles: dict[str, str]
    """Role of the workflow to policy."""
    pipeline: Pipeline
    eval: EvalSpec | None = None
    limits: Limits = field(default_factory=Limits)
    scaling: Scaling = field(default_factory=Scaling)
    config_digest: str = ""
    """Empty: not checked."""
    code_digest: str = ""
    config: dict[str, str] = field(default_factory=dict)
    """Path of each setting to its value as JSON: what a process of another config is told apart by."""

    def __post_init__(self) -> None:
        _at_least("RunSpec.steps", self.steps, 0)
        if not self.policies:
            raise ConfigError("RunSpec.policies is empty: a run needs at least one policy")
        for role, policy in self.roles.items():
            if policy not in self.policies:
                raise ConfigError(f"role {role!r} maps to unknown policy {policy!r}; known: {sorted(self.policies)}")
        if self.eval is not None and self.eval.policy and self.eval.policy not in self.policies:
            raise ConfigError(f"EvalSpec.policy {self.eval.policy!r} is unknown; known: {sorted(self.policies)}")
        if self.steps > 0 and not self.trainable:
            raise ConfigError(f"RunSpec.steps is {self.steps}, but none of {sorted(self.policies)} is trainable")

    @property
    def trainable(self) -> tuple[str, ...]:
        """Of the recipe; ``Policies.trainable`` has those that joined too."""
        return tuple(name for name, spec in self.policies.items() if spec.trainable)

    @property
    def evaluated(self) -> str:
        """The policy whose versions are evaluated."""
        if self.eval is not None and self.eval.policy:
            return self.eval.policy
        return next(iter(self.trainable or self.policies))
