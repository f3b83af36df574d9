"""Five questions, five protocols. An algorithm is one small object: numpy only, no I/O, no clock, seeded.

    Curate  which task next, how many episodes?      Pace    may another group start?
    Credit  what advantage?                          Keep    train on it? (None or a reason)
    Select  which groups now?

They see summaries (rewards, lengths, versions, features), never tokens. ``state_dict`` holds msgpack types and arrays
only; it is written in the transaction of the decision that changed it, so the same seed gives the same choices after
a restart. Letters: U units of one group for one policy, G episodes of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from astraflow.types import Array, Outcome, Task

State = dict[str, Any]
REASON = re.compile(r"[a-z][a-z0-9_]*")
"""Of a group that is dropped or a sample that is masked: it is part of a metric's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTable:
    """What is credited: one row per unit (episode, policy, role, turn, sample) of one group and one policy."""

    episode: Array
    """int64 [U]: index of the episode in the group."""
    role: tuple[str, ...]
    turn: Array
    """int64 [U]"""
    sample_id: tuple[str, ...]
    reward: Array
    """float64 [U]; NaN where not scored: read it only through ``counts``."""
    counts: Array
    """bool [U]: scored, and of an episode that completed or was truncated: enters baselines."""
    tokens: Array
    """int64 [U]: sampled tokens."""
    min_version: Array
    """int64 [U]"""
    outcome: tuple[Outcome, ...]
    """[U]"""
    baseline_key: tuple[str, ...]
    """[U]: never empty."""
    dataset: str = ""
    """Of the group's task; empty: not known."""
    score: Array | None = None
    """float64 [U]: the episode's own score, all roles and policies together; NaN where it has none. None: not known."""
    without: Array | None = None
    """float64 [U]: that score had this unit's role done nothing (the workflow's feature ``without/ROLE``); NaN where
    the workflow did not say. None: not known."""

    def __len__(self) -> int:
        return len(self.role)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSummary:
    """A closed group as algorithms see it, for one policy."""

    group: int
    policy: str
    task: Task
    """``payload`` is left empty."""
    size: int
    outcomes: tuple[Outcome, ...]
    """[G], lost members included as FAILED."""
    units: UnitTable
    min_version: int | None
    """Oldest version that sampled anything; None if nothing was."""
    arrival: int
    """Order of closing: the tie-break."""
    use: int = 0
    features: dict[str, Array] = field(default_factory=dict)
    version: int = 0
    """Committed steps of the policy when the group was settled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """Curate's answer."""

    task: Task
    episodes: int
    """Size of the group: from 1 to ``checks.MOST_EPISODES``."""
    version_choice: float = 0.0
    """In [0, 1]: chance that a turn is sampled by an older version, where the engine holds one (``Lease``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRoom:
    """What Pace sees of one trainable policy."""

    version: int
    """Current: committed steps."""
    max_staleness: int
    groups_per_batch: int
    open_groups: int
    """Train groups alive and not yet settled for it."""
    kept_groups: int
    """Settled, kept, in no batch yet."""
    batched_groups: int
    steps_left: int
    replayed_groups: int = 0
    """Of the next batch's groups, how many will be replayed: fresh ones are needed for the others only."""
    overtaken_groups: int = 0
    """Of the open ones: a whole batch of groups that were opened later has closed before them."""


@runtime_checkable
class Stateful(Protocol):
    """What any algorithm may be: it goes on after a restart as if there had been none."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


@runtime_checkable
class Curate(Protocol):
    def next(self) -> Admission | None:
        """The next group to open; None: no task now (a finite dataset is used up)."""

    def observe(self, summary: GroupSummary) -> None:
        """A group closed."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


@runtime_checkable
class Pace(Protocol):
    def may_admit(self, rooms: dict[str, PolicyRoom]) -> bool:
        """Optimisation only: the sweep at the cut is what guarantees the bound."""


@runtime_checkable
class StepPace(Protocol):
    """A Pace may also be one: it holds back steps too, where policies are to advance together."""

    def may_step(self, policy: str, rooms: dict[str, PolicyRoom]) -> bool:
        """May this policy's next batch be cut? Whoever is told no must be told yes in the end by others' steps."""


@runtime_checkable
class Credit(Protocol):
    def group(self, units: UnitTable) -> Array:
        """float32 [U], one advantage per unit; 0 where ``counts`` is False."""

    def batch(self, units: Sequence[UnitTable], advantages: Sequence[Array]) -> list[Array]:
        """Once when a batch is cut (whitening, per task); the identity for most."""


@runtime_checkable
class Narrows(Protocol):
    """A Credit may also be one: fewer units count in it. Whoever works on its advantages leaves the others at 0."""

    def narrowed(self, units: UnitTable) -> UnitTable:
        """The same units, of which those count that this Credit compares."""


@runtime_checkable
class Keep(Protocol):
    def verdict(self, summary: GroupSummary, advantages: Array) -> str | None:
        """None: keep. Else the reason (``REASON``), which is also the metric's name."""


@runtime_checkable
class Mask(Protocol):
    """A Keep may also be one: of a kept group, some samples take no gradient; their rewards stay in the baseline."""

    def mask(self, summary: GroupSummary) -> dict[str, str]:
        """sample_id → reason (``REASON``), of the group's samples that are to be masked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyGroup:
    """A kept group waiting to be cut."""

    group: int
    min_version: int | None
    arrival: int


@runtime_checkable
class Select(Protocol):
    def pick(self, ready: Sequence[ReadyGroup], *, need: int, oldest_open: int | None) -> list[int]:
        """``need`` group ids in serving order, or an empty list: not yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredGroup:
    """A group that was trained and may be again: young enough, in no batch that is under way."""

    group: int
    age: int
    """Versions between its freshest sample and the step to come; within the bound."""
    arrival: int
    uses: int
    """Batches that it was in so far; at least 1."""
    advantage: float
    """Mean |advantage| of its units, as it was trained."""


@runtime_checkable
class Replay(Protocol):
    """A Select may also be one: some groups of a batch come again. They keep their behaviour log-probs and advantages.

    Called when a batch may be cut. State changes only with an answer that is not empty.
    """

    def share(self, stored: Sequence[StoredGroup], *, policy: str, need: int) -> int:
        """How many groups of the policy's next batch of ``need`` would be replayed; fewer than ``need``."""

    def pick_with(
        self,
        ready: Sequence[ReadyGroup],
        stored: Sequence[StoredGroup],
        *,
        policy: str,
        need: int,
        oldest_open: int | None,
    ) -> tuple[list[int], list[int]]:
        """(fresh, replayed) groups, ``need`` in all and each in serving order, or two empty lists: not yet."""
