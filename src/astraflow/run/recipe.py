"""What a user writes: one frozen typed tree, made by a function ``recipe() -> Recipe`` that every process imports.

Recipe ── policies: name → Policy(model, trainer, engine)      roles: role → policy
       ├─ workflow, tasks, pipeline, sampling, eval            what is learnt
       └─ group_size, steps, seed, limits, rollout             how much, how fast
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from astraflow.algorithms.checks import check_episodes, check_finite
from astraflow.algorithms.credit import GroupMean
from astraflow.algorithms.curate import Shuffled
from astraflow.algorithms.keep import DropZeroVariance
from astraflow.algorithms.pace import BoundedStaleness
from astraflow.algorithms.pace_rounds import SCHEDULES
from astraflow.algorithms.pipeline import Pipeline
from astraflow.algorithms.select import EarliestDeadline
from astraflow.dataflow.autoscale import Scaling
from astraflow.dataflow.settings import Limits
from astraflow.engines.settings import EngineSettings
from astraflow.errors import ConfigError
from astraflow.rollout.settings import RolloutSettings
from astraflow.run.model_cache import require_model_folder
from astraflow.run.tiny_model import TinyModel
from astraflow.tasks.base import TaskSource
from astraflow.trainer.settings import TrainerSettings
from astraflow.types import Sampling
from astraflow.weights.settings import WeightSettings
from astraflow.wire.names import require_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """One named model of the run."""

    model: str | Path | TinyModel | Callable[[], Path]
    """A folder, ``smollm2``, a ``TinyModel``, or a function that builds a folder and names it."""
    trainable: bool = True
    max_staleness: int = 2
    """Versions between the one that sampled a token and the one that its step starts from; 0 is on-policy."""
    groups_per_batch: int = 8
    steps: int | None = None
    """Committed versions at which this policy ends; None: ``Recipe.steps``. Others go on and play with its last one."""
    keep_every: int = 0
    """Every so many versions one stays in the store, for a frozen policy to play with later (a league); 0: none."""
    average_of: str = ""
    """With ``trainable=False``: its versions are a moving average of this policy's; empty: it has one version."""
    decay: float = 0.9
    """How much of itself such an average keeps with every version of the other."""
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    engine: EngineSettings = field(default_factory=lambda: EngineSettings(versions_held=2))
    """Two versions: evaluation stays with the one that it began with while training moves on."""

    def __post_init__(self) -> None:
        _at_least("Policy.max_staleness", self.max_staleness, 0)
        _at_least("Policy.groups_per_batch", self.groups_per_batch, 1)
        _at_least("Policy.keep_every", self.keep_every, 0)
        if not 0 < self.decay < 1:
            raise ConfigError(f"Policy.decay must be in (0, 1), found {self.decay}")
        if self.average_of and self.trainable:
            raise ConfigError(f"Policy.average_of {self.average_of!r} needs trainable=False: an average is not trained")
        if self.steps is not None:
            _at_least("Policy.steps", self.steps, 0)

    def folder(self, say: Callable[[str], None] = lambda _: None) -> Path:
        """The model's folder, built when it is not there yet. Raises ConfigError."""
        if isinstance(self.model, TinyModel):
            return self.model.build()
        if isinstance(self.model, str | Path) and not Path(self.model).exists():
            from astraflow.run.models import KNOWN, get

            if str(self.model) in KNOWN:
                return get(str(self.model), say=say)
        folder = Path(self.model) if isinstance(self.model, str | Path) else Path(self.model())
        return require_model_folder(folder.expanduser().resolve(), what="Policy.model")


@dataclass(frozen=True, kw_only=True, slots=True)
class Eval:
    """Held-out tasks, played at chosen versions and never trained."""

    tasks: TaskSource
    count: int = 100
    every: int = 0
    """Versions between two evaluations; 0: only before the first step and after the last."""
    episodes: int = 1
    """Per task; more than one is of use only where ``sampling`` is not greedy."""
    sampling: Sampling | None = None
    """None: greedy, the rest as in training."""
    policy: str = ""
    """Whose versions; empty: the first trainable one."""
    passing: float = 1.0
    """Score from which an attempt has solved its task: decides pass@k, which is shown where ``episodes`` > 1."""

    def __post_init__(self) -> None:
        _at_least("Eval.count", self.count, 1)
        _at_least("Eval.every", self.every, 0)
        check_episodes("Eval.episodes", self.episodes)
        check_finite("Eval.passing", self.passing)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One run."""

    name: str
    policies: dict[str, Policy]
    roles: dict[str, str] = field(default_factory=dict)
    """Role of the workflow → policy. Empty: every policy plays the role of its own name."""
    workflow: Any
    """Async callable ``(task, agents) -> Reward``, or its name ``package.module:object``."""
    tasks: TaskSource
    pipeline: Pipeline | Callable[[Recipe], Pipeline] | None = None
    """The five choices, or a function that makes them of this recipe; None: GRPO (``default_pipeline``)."""
    schedule: str = "async"
    """``async``: the pipeline's own Pace. For comparison: ``barrier`` (all policies step together), ``sync`` (generate
    a whole batch, then train, then update)."""
    sampling: Sampling = field(default_factory=Sampling)
    eval: Eval | None = None
    group_size: int = 8
    """Episodes of one task, at most 65,536."""
    steps: int = 100
    """Committed versions at which a trainable policy ends that has no ``steps`` of its own."""
    seed: int = 0
    limits: Limits = field(default_factory=Limits)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    weights: WeightSettings = field(default_factory=WeightSettings)
    services: int = 1
    """Rollout services that the launcher starts; more may join from anywhere."""
    scaling: Scaling = field(default_factory=Scaling)
    """How many rollout services there should be: for ``astraflow autoscale`` and ``GET /v1/pool/target``."""
    regions: tuple[str, ...] = ()
    """Names that workers may give by ``--region``; empty: any. Workers of one region share weights by relays. Services
    of the launcher are in the first one."""
    store: str = ""
    """URL of an object store for the weights (``s3://bucket/run-7``), a prefix of its own; empty: dataflow's folder."""
    places: tuple[tuple[str, ...], ...] = ()
    """Policies that each service of the launcher has engines for, in turn; what another has is asked for at its
    endpoint. Empty: every service serves all."""
    allow_truncated_sampling: bool = False
    """Accept top_p < 1 or top_k in training, whose importance ratios are biased."""

    def __post_init__(self) -> None:
        if not self.policies:
            raise ConfigError(
                "Recipe.policies is empty: name at least one, for example {'main': Policy(model='smollm2')}"
            )
        if not self.name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise ConfigError(f"Recipe.name may hold letters, digits, '-', '_' and '.', found {self.name!r}")
        if self.schedule not in ("async", *SCHEDULES):
            raise ConfigError(f"Recipe.schedule must be one of async, {', '.join(SCHEDULES)}, found {self.schedule!r}")
        check_episodes("Recipe.group_size", self.group_size)
        _at_least("Recipe.steps", self.steps, 0)
        _at_least("Recipe.seed", self.seed, 0)
        for region in self.regions:
            require_name(region, "Recipe.regions")
        _at_least("Recipe.services", self.services, 0)

    def with_workflow(self, workflow: Any) -> Recipe:
        return dataclasses.replace(self, workflow=workflow)

    def with_pipeline(self) -> Recipe:
        """With its pipeline built: from then on ``pipeline`` is a ``Pipeline``."""
        made = self.pipeline
        if not isinstance(made, Pipeline):
            made = default_pipeline(self) if made is None else made(self)
        if not isinstance(made, Pipeline):
            raise ConfigError(f"Recipe.pipeline must give a Pipeline, found {type(made).__name__}")
        pace = SCHEDULES.get(self.schedule)
        return dataclasses.replace(self, pipeline=made if pace is None else dataclasses.replace(made, pace=pace()))

    @property
    def casting(self) -> dict[str, str]:
        """Role → policy."""
        return dict(self.roles) or {name: name for name in self.policies}

    def rollout_settings(self) -> RolloutSettings:
        """With the recipe's sampling in them: the only place that decides it is ``Recipe.sampling`` (F99)."""
        greedy = msgspec.structs.replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0)
        evaluated = self.eval.sampling if self.eval is not None and self.eval.sampling is not None else greedy
        return dataclasses.replace(self.rollout, sampling=self.sampling, eval_sampling=evaluated)

    @property
    def trainable(self) -> tuple[str, ...]:
        return tuple(name for name, policy in self.policies.items() if policy.trainable)

    @property
    def averages(self) -> tuple[str, ...]:
        return tuple(name for name, policy in self.policies.items() if policy.average_of)

    def steps_of(self, policy: str) -> int:
        """Committed versions at which a policy ends."""
        own = self.policies[policy].steps
        return self.steps if own is None else own


def default_pipeline(recipe: Recipe) -> Pipeline:
    """GRPO: shuffled tasks, bounded staleness, advantages over the group's deviation, no groups without signal."""
    return Pipeline(
        curate=Shuffled(recipe.tasks, group_size=recipe.group_size, seed=recipe.seed),
        pace=BoundedStaleness(),
        credit=GroupMean(std=True),
        keep=(DropZeroVariance(),),
        select=EarliestDeadline(),
    )


def _at_least(name: str, value: float, lowest: float) -> None:
    if not value >= lowest:
        raise ConfigError(f"{name} must be at least {lowest}, found {value}")
