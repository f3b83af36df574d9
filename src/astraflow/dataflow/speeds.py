"""What episodes took: how fast each worker is, how long a task's episodes are, how long a version lasts.

A memory of the events of this run, as dataflow's clock saw them; nobody says of himself how fast he is. Estimates, by
which leases are given out and nothing else is decided: after a restart they are read again.

    worker   seconds a sampled token, from lease to result, the last ``FADES`` episodes weighing most
    task     the longest of its last episodes; before the first, the run's median
    policy   seconds a version lasts × bound = how long what is sampled now can be trained
"""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import pairwise
from math import inf
from statistics import median

import msgspec

from astraflow.dataflow.assign import ALIKE, Paces
from astraflow.dataflow.components import Components
from astraflow.dataflow.settings import RunSpec
from astraflow.dataflow.store import Store
from astraflow.observe.waits import QUARANTINED, Wait
from astraflow.types import FailureKind

READ_S = 1.0
"""Between two looks at what is new."""
READ_BACK = 20_000
"""Events that are read again after a restart."""
LEAST_S = 1e-6
"""An episode takes time, even where the clock did not move: a pace divides."""
FADES = 32.0
RECENT = 256
"""Episodes whose lengths make the run's median."""
OF_A_TASK = 8
MOST_TASKS = 50_000
VERSIONS = 9
MARGIN = 0.5
"""Versions: a group waits for its batch, and a version does not begin when its first episode does."""
ELSEWHERE = {QUARANTINED, "starting", *(wait.value for wait in (Wait.WEIGHTS, Wait.STORAGE, Wait.DATAFLOW))}
"""What a worker does that asks for no lease meanwhile: nothing is left for it."""


TOO_LONG = (FailureKind.CANCELLED, FailureKind.TIMEOUT)
"""An episode that was given up for this would have taken longer than it had: that much is known of its length."""


class Said(msgspec.Struct):
    """Of a ``done`` or ``given_up`` event."""

    tokens: int = 0
    failure: str = ""


class Speeds:
    """``read`` now and then; questions any time."""

    def __init__(self, store: Store, components: Components, spec: RunSpec) -> None:
        self._store = store
        self._components = components
        self._bounds = {name: spec.policies[name].max_staleness for name in spec.trainable}
        self._event: int | None = None
        self._read_at = -inf
        self._took: dict[str, tuple[float, float]] = {}
        """Worker → (seconds, tokens), fading."""
        self._lengths: OrderedDict[str, deque[float]] = OrderedDict()
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._typical: float = 0.0
        self._commits: dict[str, deque[float]] = {}
        self._serving: frozenset[str] = frozenset()

    def read(self, now: float) -> None:
        """What is on disk since the last time."""
        if now - self._read_at < READ_S:
            return
        self._read_at = now
        newest = self._store.number("SELECT MAX(id) FROM events")
        after = max(0, newest - READ_BACK) if self._event is None else self._event
        self._event = newest
        for at, kind, policy, data, leased_at, worker, task in self._store.all(
            "SELECT v.at, v.kind, v.policy, v.data, e.leased_at, e.worker, g.task_key FROM events v "
            "LEFT JOIN episodes e ON v.kind <> 'committed' AND e.group_id = v.group_id AND e.idx = v.idx "
            "AND e.lane = 0 LEFT JOIN groups g ON g.id = e.group_id "
            "WHERE v.id > ? AND v.id <= ? AND v.kind IN ('done', 'given_up', 'committed') ORDER BY v.id",
            after,
            newest,
        ):
            if kind == "committed":
                self._commits.setdefault(policy, deque(maxlen=VERSIONS)).append(at)
            elif leased_at is not None:
                said = msgspec.json.decode(data, type=Said)
                if said.tokens:
                    self._played(task, worker, said.tokens, at - leased_at)
                elif said.failure in TOO_LONG and worker in self._took:
                    self._note(task, (at - leased_at) / self._pace(worker))
        self._typical = median(self._recent) if self._recent else 0.0
        self._serving = frozenset(
            row.name
            for row in self._components.all()
            if row.name in self._took and row.state == "alive" and not row.report.error
            and row.report.doing not in ELSEWHERE and not self._components.drains(row.name)
        )  # fmt: skip

    def _played(self, task: str, worker: str, tokens: int, seconds: float) -> None:
        before_s, before = self._took.get(worker, (0.0, 0.0))
        fade = 1.0 - 1.0 / FADES
        self._took[worker] = (before_s * fade + max(seconds, LEAST_S), before * fade + tokens)
        self._recent.append(tokens)
        self._note(task, tokens)

    def _note(self, task: str, tokens: float) -> None:
        self._lengths.setdefault(task, deque(maxlen=OF_A_TASK)).append(tokens)
        self._lengths.move_to_end(task)
        if len(self._lengths) > MOST_TASKS:
            self._lengths.popitem(last=False)

    # ── questions ──

    def paces(self, worker: str) -> Paces | None:
        """As the asking worker sees them; None: all are alike, or nothing can be late, so that speed does not matter.
        A worker that has sent nothing yet counts as average."""
        known = {name: self._pace(name) for name in self._serving | ({worker} & self._took.keys())}
        if not known:
            return None
        own = known.setdefault(worker, median(known.values()))
        every = tuple(sorted(known.values()))
        return Paces(own=own, all=every) if every[-1] > every[0] * ALIKE else None

    def _pace(self, worker: str) -> float:
        seconds, tokens = self._took[worker]
        return seconds / tokens

    def tokens(self, task: str | None = None) -> float:
        """That an episode of this task, or of any, is expected to sample. Of a task that was played before, as many as
        the longest did: a group is as late as its last."""
        return max(self._lengths.get(task, ()), default=self._typical) if task is not None else self._typical

    def horizon_s(self, now: float) -> float:
        """How long a sample can be trained that is sampled now, by the policy for which that is shortest; infinite as
        long as too few steps were seen, and on-policy, where the trainer waits for what is played."""
        return min(
            (self._lasts(policy, now) * (bound - MARGIN) for policy, bound in self._bounds.items() if bound),
            default=inf,
        )

    def _lasts(self, policy: str, now: float) -> float:
        """A version; a trainer that has made none for long makes them as slowly as that."""
        commits = self._commits.get(policy)
        if commits is None or len(commits) < 2:
            return inf
        steps = [after - before for before, after in pairwise(commits)]
        return max(sum(steps) / len(steps), now - commits[-1], 1e-9)
