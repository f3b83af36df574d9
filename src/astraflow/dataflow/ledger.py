"""The ledger of one run: every transition is one method, takes ``now`` and touches nothing but its database.

No socket, thread, sleep or clock here; the caller holds the transaction (``store.transaction``, one ``savepoint`` per
transition). Time is logical: the last stored value plus the monotonic time since this start, so that it never goes
back whatever the clocks do.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from astraflow.algorithms.base import State
from astraflow.algorithms.pipeline import ANOTHER
from astraflow.dataflow.batches import Batches
from astraflow.dataflow.components import TRAINER, Components
from astraflow.dataflow.counts import Counts
from astraflow.dataflow.cut import Cut, CutGroup
from astraflow.dataflow.episodes import Episodes
from astraflow.dataflow.evals import Evals
from astraflow.dataflow.groups import Groups
from astraflow.dataflow.payloads import Payloads
from astraflow.dataflow.policies import Policies
from astraflow.dataflow.settings import RunSpec
from astraflow.dataflow.speeds import Speeds
from astraflow.dataflow.store import Store
from astraflow.dataflow.tally import state_digest
from astraflow.errors import BadRequest, ConfigError, RunFailed, by_kind
from astraflow.types import FailureKind, Manifest, Task
from astraflow.wire import messages as m
from astraflow.wire.codec import decode, encode

SCHEMA = 2
USER_CODE = (FailureKind.WORKFLOW, FailureKind.GRADER, FailureKind.TIMEOUT)
"""Failures that the user's code may be the cause of; one that never returns is among them."""
FORGIVEN = "forgiven_failures"
"""Key of how many failures in user code there were when the operator let the run go on: they count no more."""


class Unchosen(NamedTuple):
    """An answer of Select that is no batch."""

    words: str
    waits: bool
    """It was told of an open group, and may hold back for that one."""


class StoredState(msgspec.Struct):
    """State of the data algorithms, as written with the decision that changed it."""

    state: State


class Ledger:
    def __init__(self, connection: sqlite3.Connection, spec: RunSpec, *, payloads: Path | None = None) -> None:
        self.spec = spec
        self.store = Store(connection)
        self.payloads = Payloads(self.store, payloads)
        self.policies = Policies(self.store, spec)
        self.groups = Groups(self.store, spec, self.policies)
        self.episodes = Episodes(self.store, spec, self.policies, self.groups, self.payloads)
        self.batches = Batches(self.store, self.policies, self.groups, self.payloads)
        self.components = Components(self.store, spec.limits)
        self.speeds = Speeds(self.store, self.components, spec)
        self.evals = Evals(self.store, spec, self.policies, self.groups)
        self.counts = Counts(self.store)
        self.exhausted = False
        """Curate had no task when it was last asked."""
        self.unchosen: dict[str, Unchosen] = {}
        """By policy: Select had a whole batch to choose from when it was last asked, and chose none."""
        self.started_at = 0.0
        """When this process began to serve."""
        self.time_text: Callable[[float], str] = lambda at: f"{at:.0f} s"
        """A logical time for people; the service, which has a clock, shows the time of day."""
        self._saved: bytes | None = None

    # ── start ──

    def open(self) -> float:
        """Begin, or go on with what is stored; returns the logical time. Raises ConfigError for another run's file."""
        store = self.store
        with store.transaction():
            run = store.get("run")
            if run is None:
                for key, value in (("run", self.spec.run), ("schema", SCHEMA), ("state", "running"), ("now", 0.0)):
                    store.set(key, value)
                store.set("config_digest", self.spec.config_digest)
            elif run != self.spec.run:
                raise ConfigError(f"this ledger is of run {run!r}, not of {self.spec.run!r}")
            elif store.get("schema") != SCHEMA:
                raise ConfigError(f"this ledger has schema {store.get('schema')}, this program reads {SCHEMA}")
            self.policies.declare()
            self.policies.reload()
            now = self.started_at = float(store.get("now"))
            self.episodes.new_terms(now)
            self.components.new_terms(now)
            store.event(now, "dataflow_started")
        self.load_algorithms()
        return now

    def load_algorithms(self) -> None:
        """What the algorithms knew at the last decision that is on disk; at first, what the recipe made.

        Raises ConfigError for what this program cannot read.
        """
        row = self.store.one("SELECT state FROM algorithms WHERE name = 'pipeline'")
        if row is None:
            self._saved = None
            initial = encode(StoredState(state=self.spec.pipeline.state_dict()))
            with self.store.transaction():
                self.store.run("INSERT INTO algorithms VALUES ('pipeline', ?)", (initial,))
                self._tell_of_algorithms(self.started_at, initial)
            self._saved = initial
            return
        self._saved = row[0]
        where = f"the algorithms' state in {self.store.where}"
        try:
            self.spec.pipeline.load_state_dict(decode(row[0], StoredState).state)
        except BadRequest as error:
            raise ConfigError(f"{where}: {error}; {ANOTHER}") from error
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error

    def save_algorithms(self, now: float) -> None:
        """In the transaction of the decision that changed them."""
        state = encode(StoredState(state=self.spec.pipeline.state_dict()))
        if state != self._saved:
            self.store.run("UPDATE algorithms SET state = ? WHERE name = 'pipeline'", (state,))
            self._tell_of_algorithms(now, state)
            self._saved = state

    def _tell_of_algorithms(self, now: float, state: bytes) -> None:
        """By digest: what they know may be large, and ``verify`` only asks whether the row is what was written."""
        self.store.event(now, "algorithms", digest=state_digest(state))

    def forget(self) -> None:
        """A transaction was rolled back: every memory of the tables is renewed."""
        self.policies.reload()
        self.load_algorithms()

    # ── the run ──

    @property
    def state(self) -> str:
        """``running``, ``finished`` or ``failed``"""
        return str(self.store.get("state"))

    @property
    def error(self) -> tuple[str, str] | None:
        """Kind and first cause of a failed run."""
        kind = self.store.get("error_kind")
        return (str(kind), str(self.store.get("error"))) if kind else None

    def stop(self, now: float, kind: str, error: str) -> None:
        """The run fails; the first cause stays."""
        if self.state != "running":
            return
        self.store.set("state", "failed")
        self.store.set("ended_at", now)
        self.store.set("error_kind", kind)
        self.store.set("error", error)
        self.store.event(now, "failed_run", error_kind=kind, error=error)

    def go_on(self, now: float) -> None:
        """Operator: the cause of the failure is mended; a run that did not fail goes on anyway."""
        if self.state != "failed":
            return
        self.store.set("state", "running")
        self.store.run("DELETE FROM meta WHERE key IN ('error', 'error_kind')")
        self.store.set(FORGIVEN, self.user_failures)
        self.store.run("UPDATE policies SET no_signal = 0, barren = 0")
        self.store.run("UPDATE batches SET failures = 0 WHERE state IN ('cut', 'issued')")
        self.store.event(now, "goes_on")

    @property
    def user_failures(self) -> int:
        """Attempts that failed in user code so far."""
        return sum(int(self.store.counter(f"failed/{kind}")) for kind in USER_CODE)

    def finish_if_done(self, now: float) -> bool:
        """Every trainable policy has its steps and no evaluation is open."""
        if self.state != "running" or not self.policies.complete or self.evals.open:
            return False
        if not all(self.trained_out(policy) for policy in self.policies.trainable):
            return False
        self.store.set("state", "finished")
        self.store.set("ended_at", now)
        self.store.event(now, "finished")
        return True

    def publish_initial(self, now: float, manifest: Manifest) -> None:
        self.policies.publish_initial(now, manifest)
        self.evals.open_if_due(now)
        self.finish_if_done(now)

    # ── batches ──

    def trained_out(self, policy: str) -> bool:
        """Whether this policy has all its steps."""
        return self.policies.versions[policy] >= self.policies.steps[policy]

    def cut_groups(self, policy: str, picked: Sequence[tuple[int, int]]) -> list[CutGroup]:
        """The picked (group, use) with what was settled for them, or, of replayed ones, what they were trained with."""
        groups = []
        for group, use in picked:
            row = self.store.one(
                "SELECT g.size, p.verdict, g.task FROM groups g JOIN group_policy p ON p.group_id = g.id "
                "WHERE g.id = ? AND p.policy = ? AND p.state = ?",
                group,
                policy,
                "trained" if use else "kept",
            )
            if row is None:
                raise RunFailed(
                    f"Select picked group {group}, which is not {'trained' if use else 'kept'} for {policy}"
                )
            masked = {
                f"{group}/{idx}/{agent}/{n}": mask
                for idx, agent, n, mask in self.store.all(
                    "SELECT idx, agent, n, mask FROM samples WHERE group_id = ? AND policy = ? AND mask IS NOT NULL",
                    group,
                    policy,
                )
            }
            groups.append(
                CutGroup(
                    group=group,
                    episodes=self.payloads.episodes(group, row[0]),
                    advantages=np.frombuffer(row[1], np.float32),
                    masked=masked,
                    use=use,
                    dataset=decode(row[2], Task).dataset,
                )
            )
        return groups

    def freeze(self, now: float, policy: str, groups: Sequence[CutGroup], cut: Cut) -> int | None:
        """A batch of these groups; None if some went stale: they are marked, others must be picked."""
        if cut.stale_groups:
            for group in cut.stale_groups:
                self.groups.make_stale(now, group, policy)
            return None
        return self.batches.freeze(now, policy, cut, [(each.group, each.use) for each in groups])

    # ── what the calls need to know ──

    def needed_policies(self) -> set[str]:
        """A worker must reach all of them to play an episode."""
        return set(self.policies.roles.values()) or set(self.spec.policies)

    def raise_if_failed(self) -> None:
        """The first cause, to whoever would wait for something that will never come."""
        error = self.error
        if error is not None:
            raise by_kind().get(error[0], RunFailed)(error[1])

    def trainer_said(self, now: float, policy: str, report: m.ComponentReport | None = None) -> None:
        """A call of the registered trainer is its heartbeat, whether or not it says what it does."""
        row = self.store.one("SELECT name, incarnation FROM trainers WHERE policy = ?", policy)
        if row is not None:
            self.components.heard(now, TRAINER, row[0], row[1])
        if row is not None and report is not None:
            self.components.said(TRAINER, row[0], report)

    def live_manifests(self) -> tuple[Manifest, ...]:
        """What somebody may still have to load: two newest publications a policy, resumed versions, open pins,
        what the recipe keeps of each policy, and what a living worker is fetching."""
        wanted = {
            (policy, version)
            for policy, version in self.store.all(
                "SELECT p.policy, p.version FROM publications p JOIN policies n ON n.name = p.policy "
                "WHERE p.serial >= n.serial - 1 UNION SELECT policy, version FROM trainers"
            )
        }
        wanted |= self.evals.pinned() | self.policies.kept()
        found = [self.policies.manifest(policy, version) for policy, version in sorted(wanted)]
        reports = [row.report for row in self.components.all() if row.state == "alive"]
        pulled = {pair for report in reports for pair in report.pulling.items()}
        pulls = (self.policies.by_serial(policy, serial) for policy, serial in sorted(pulled))
        return (*found, *(manifest for manifest in pulls if manifest is not None))
