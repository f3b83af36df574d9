"""Episodes: leased, renewed, submitted once, tried again or given up. Attempts fence."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from astraflow.dataflow.groups import Groups
from astraflow.dataflow.payloads import Payloads
from astraflow.dataflow.policies import Policies
from astraflow.dataflow.settings import RunSpec
from astraflow.dataflow.store import Store
from astraflow.errors import BadRequest, Closed, Fenced, UnknownLease, UnknownVersion
from astraflow.observe.points import reach
from astraflow.types import Episode, FailureKind, Lease, Outcome, Purpose, Task
from astraflow.wire.codec import decode

Place = tuple[int, int]
"""(group, index)"""
SUPERVISED_DONE = "supervised_done"
"""Counter: of ``episodes_done``, those that only tokenised a row."""
USER_FAILURES = 2
"""User code that raised is tried once more: it may be luck, but no third time."""


class Waiting(NamedTuple):
    """A pending training episode that needs an engine."""

    group: int
    idx: int
    task: str
    """Key."""
    opened_at: float
    """Of its group, or when it was leased last."""
    begun_at: float
    """When the first of its group that was not lost was leased; now, if none was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    duplicate: bool = False
    ready: bool = False
    """This episode was the last of its group."""


class Episodes:
    def __init__(self, store: Store, spec: RunSpec, policies: Policies, groups: Groups, payloads: Payloads) -> None:
        self.played: Counter[str] = Counter()
        """By worker, of this dataflow: episodes that it played to an outcome."""
        self._store = store
        self._spec = spec
        self._policies = policies
        self._groups = groups
        self._payloads = payloads

    # ── leases ──

    def pending(self, *, lane: int, supervised: bool, limit: int) -> list[Place]:
        """Oldest first."""
        return self._store.all(
            "SELECT group_id, idx FROM episodes WHERE state = 'pending' AND lane = ? AND supervised = ? "
            "ORDER BY group_id, idx LIMIT ?",
            lane,
            int(supervised),
            limit,
        )

    def waiting(self, now: float, *, limit: int) -> list[Waiting]:
        """Of the training lane, oldest first."""
        rows = self._store.all(
            "SELECT e.group_id, e.idx, g.task_key, COALESCE(e.leased_at, g.opened_at), "
            "COALESCE((SELECT MIN(o.leased_at) FROM episodes o "
            "WHERE o.group_id = e.group_id AND o.state IN ('leased', 'done')), ?) "
            "FROM episodes e JOIN groups g ON g.id = e.group_id "
            "WHERE e.state = 'pending' AND e.lane = 0 AND e.supervised = 0 ORDER BY e.group_id, e.idx LIMIT ?",
            now,
            limit,
        )
        return [Waiting(*row) for row in rows]

    def held(self, worker: str) -> tuple[int, int]:
        """Leases that a worker holds: (train, eval)."""
        counts: dict[int, int] = dict(
            self._store.all(
                "SELECT lane, COUNT(*) FROM episodes WHERE state = 'leased' AND worker = ? GROUP BY lane", worker
            )
        )
        return counts.get(0, 0), counts.get(1, 0)

    def lease(self, now: float, worker: str, places: Sequence[Place]) -> tuple[Lease, ...]:
        """Give these pending episodes to a worker."""
        limits = self._spec.limits
        versions = json.dumps({name: manifest.version for name, manifest in self._policies.newest.items()})
        tasks: dict[int, tuple[Task, Purpose, dict[str, int], float]] = {}
        before: dict[Place, int] = {}
        leases = []
        for group, idx in places:
            if group not in tasks:
                tasks[group] = self._task(group)
                before |= self._attempts(group)
            task, purpose, pins, choice = tasks[group]
            attempt = before[group, idx] + 1
            leases.append(
                Lease(
                    group=group,
                    index=idx,
                    attempt=attempt,
                    task=task,
                    purpose=purpose,
                    seed=episode_seed(self._spec.seed, group, idx, attempt),
                    ttl_s=limits.lease_ttl_s,
                    time_limit_s=limits.time_limit_s,
                    versions=pins,
                    version_choice=choice,
                    roles=self._cast(group),
                )
            )
        ends = (now + limits.lease_ttl_s, now + limits.time_limit_s + limits.grace_s)
        self._store.run_many(
            "UPDATE episodes SET state = 'leased', attempt = attempt + 1, worker = ?, leased_at = ?, expires_at = ?, "
            "deadline_at = ?, leased_versions = ? WHERE group_id = ? AND idx = ?",
            [(worker, now, *ends, versions, each.group, each.index) for each in leases],
        )
        self._store.events(
            now, "leased", [(each.group, each.index, {"attempt": each.attempt, "worker": worker}) for each in leases]
        )
        return tuple(leases)

    def _attempts(self, group: int) -> dict[Place, int]:
        """Of its pending episodes: how often each was leased."""
        rows = self._store.all("SELECT idx, attempt FROM episodes WHERE group_id = ? AND state = 'pending'", group)
        return {(group, idx): attempt for idx, attempt in rows}

    def _task(self, group: int) -> tuple[Task, Purpose, dict[str, int], float]:
        row = self._store.one(
            "SELECT g.task, g.purpose, g.versions, COALESCE(c.chance, 0.0) FROM groups g "
            "LEFT JOIN version_choices c ON c.group_id = g.id WHERE g.id = ?",
            group,
        )
        assert row is not None
        return decode(row[0], Task), Purpose(row[1]), json.loads(row[2]), row[3]

    def _cast(self, group: int) -> dict[str, str]:
        """Role to policy where that is no longer the recipe's when the group was opened; empty: it was."""
        row = self._store.one("SELECT roles FROM casts WHERE group_id = ?", group)
        return {} if row is None else json.loads(row[0])

    def renew(self, now: float, worker: str, held: Iterable[str]) -> tuple[str, ...]:
        """Extend what the worker still holds; returns the ids of what it has lost."""
        expires = now + self._spec.limits.lease_ttl_s
        lost = []
        for lease in held:
            group, idx, attempt = parse_lease(lease)
            changed = self._store.run(
                "UPDATE episodes SET expires_at = ? WHERE group_id = ? AND idx = ? AND attempt = ? "
                "AND state = 'leased' AND worker = ?",
                (expires, group, idx, attempt, worker),
            ).rowcount
            if not changed:
                lost.append(lease)
        return tuple(lost)

    def hand_back(self, now: float, worker: str, held: Iterable[str]) -> None:
        """Pending again at once; no failure of the episode."""
        for lease in held:
            group, idx, attempt = parse_lease(lease)
            changed = self._store.run(
                "UPDATE episodes SET state = 'pending', worker = NULL WHERE group_id = ? AND idx = ? AND attempt = ? "
                "AND state = 'leased' AND worker = ?",
                (group, idx, attempt, worker),
            ).rowcount
            if changed:
                self._store.event(now, "handed_back", group=group, idx=idx, attempt=attempt, worker=worker)
                self._store.count("handed_back")

    def new_terms(self, now: float) -> None:
        """After a restart of dataflow nobody could renew: every live lease gets a full new term."""
        limits = self._spec.limits
        self._store.run(
            "UPDATE episodes SET expires_at = ?, deadline_at = MAX(deadline_at, ?) WHERE state = 'leased'",
            (now + limits.lease_ttl_s, now + limits.lease_ttl_s),
        )

    # ── results ──

    def submit(self, now: float, worker: str, group: int, idx: int, attempt: int, episode: Episode) -> Submitted:
        """Store once. Raises UnknownLease, Fenced, Closed, UnknownVersion, BadRequest: nothing has then changed."""
        row = self._store.one(
            "SELECT e.state, e.attempt, e.submitted, e.supervised, g.task_key, g.purpose, e.worker FROM episodes e "
            "JOIN groups g ON g.id = e.group_id WHERE e.group_id = ? AND e.idx = ?",
            group,
            idx,
        )
        name = f"{group}/{idx}/{attempt}"
        if row is None or not 1 <= attempt <= row[1]:
            raise UnknownLease(f"lease {name} was never given in run {self._spec.run}")
        state, current, submitted, supervised, task_key, purpose, holder = row
        if attempt == submitted:
            self._store.count("duplicates")
            return Submitted(duplicate=True)
        if attempt < current:
            raise Fenced(f"lease {name} ran out and attempt {current} exists: this result is not needed")
        if state not in ("leased", "pending"):
            raise Closed(f"episode {group}/{idx} had ended as {state} before attempt {attempt} came")
        if state == "leased" and worker != holder:
            raise UnknownLease(f"lease {name} was given to {holder!r}, not to {worker!r}: only its holder ends it")
        if episode.task_key != task_key:
            raise BadRequest(f"lease {name} is of task {task_key!r}, the episode of {episode.task_key!r}")
        self._check(name, group, episode)
        if state == "pending":
            self._store.count("late")
        if episode.failure is not None:
            self._store.run(
                "UPDATE episodes SET submitted = ? WHERE group_id = ? AND idx = ?",
                (attempt, group, idx),
            )
            ready = self.fail(now, group, idx, episode.failure, episode.error or "", worker=worker, episode=episode)
            return Submitted(ready=ready)
        self._store.count("episodes_done")
        if supervised:
            self._store.count(SUPERVISED_DONE)
        reach("dataflow.in_submit")
        samples = self._keep_samples(group, idx, episode, train=purpose == Purpose.TRAIN)
        return Submitted(ready=self._done(now, worker, group, idx, attempt, episode, samples))

    def _done(
        self, now: float, worker: str, group: int, idx: int, attempt: int, episode: Episode, samples: int
    ) -> bool:
        self._store.run(
            "UPDATE episodes SET state = 'done', submitted = ?, outcome = ?, worker = ?, ended_at = ?, score = ?, "
            "samples = ? WHERE group_id = ? AND idx = ?",
            (attempt, episode.outcome, worker, now, episode.score, samples, group, idx),
        )
        self.played[worker] += 1
        self._store.event(
            now, "done", group=group, idx=idx, attempt=attempt, worker=worker, outcome=episode.outcome,
            score=episode.score, wall_s=round(episode.wall_s, 3), samples=self._by_policy(episode, samples),
            tokens=_sampled(episode),
        )  # fmt: skip
        return self._groups.member_ended(now, group)

    def _keep_samples(self, group: int, idx: int, episode: Episode, *, train: bool) -> int:
        """Bytes and one row per sample; only samples of trainable policies are accounted for."""
        self._payloads.put_episode(group, idx, episode)
        trainable = self._policies.trainable
        rows = [
            (group, each.policy, idx, each.agent, n, int(np.count_nonzero(sample.sampled)), sample.min_version)
            for each in episode.trajectories
            if train and each.policy in trainable
            for n, sample in enumerate(each.samples)
        ]
        self._store.run_many(
            "INSERT INTO samples (group_id, policy, idx, agent, n, state, tokens, min_version) "
            "VALUES (?, ?, ?, ?, ?, 'held', ?, ?)",
            rows,
        )
        return len(rows)

    def _by_policy(self, episode: Episode | None, stored: int) -> dict[str, int]:
        """Samples stored, for the log; nothing if none were."""
        counts: dict[str, int] = {}
        for each in episode.trajectories if episode is not None and stored else ():
            if each.policy in self._policies.trainable:
                counts[each.policy] = counts.get(each.policy, 0) + len(each.samples)
        return counts

    def _check(self, name: str, group: int, episode: Episode) -> None:
        """What an episode names must exist: agents once, policies of the run, spans of published weights."""
        published = self._policies.published
        roles = self._cast(group) or self._spec.roles
        agents = set()
        for each in episode.trajectories:
            if each.agent in agents:
                raise BadRequest(f"episode of lease {name} has two agents {each.agent!r}")
            agents.add(each.agent)
            self._policies.require(each.policy)
            if roles.get(each.role, each.policy) != each.policy:
                raise BadRequest(
                    f"episode of lease {name}: role {each.role!r} plays policy {roles[each.role]!r}, "
                    f"found {each.policy!r}"
                )
            for turn in each.turns:
                if turn.sample >= len(each.samples) or turn.stop > len(each.samples[turn.sample].tokens):
                    raise BadRequest(f"episode of lease {name}: turn {turn.index} is outside of its samples")
            for sample in each.samples:
                for span in sample.spans:
                    if (each.policy, span.version, span.digest) not in published:
                        raise UnknownVersion(
                            f"episode of lease {name}: no published weights of {each.policy} are version "
                            f"{span.version} with digest {span.digest[:12]}…"
                        )

    # ── failures ──

    def fail(
        self,
        now: float,
        group: int,
        idx: int,
        kind: FailureKind,
        error: str,
        *,
        worker: str | None,
        episode: Episode | None = None,
    ) -> bool:
        """Failed(kind): pending again or given up; True if its group is ready by that."""
        row = self._store.one(
            "UPDATE episodes SET failures = failures + 1, user_failures = user_failures + ?, error = ? "
            "WHERE group_id = ? AND idx = ? RETURNING failures, user_failures, attempt",
            int(kind is FailureKind.WORKFLOW),
            f"{kind}: {error}"[:2000],
            group,
            idx,
        )
        assert row is not None
        failures, user_failures, attempt = row
        self._store.count(f"failed/{kind}")
        limit = self._spec.limits.max_attempts
        final = failures >= limit or (kind is FailureKind.WORKFLOW and user_failures >= USER_FAILURES)
        final = final or (episode is not None and episode.final)
        self._store.event(
            now, "failed", group=group, idx=idx, attempt=attempt, failure=kind, error=error[:500], worker=worker,
            again=not final,
        )  # fmt: skip
        if final:
            return self.give_up(now, group, idx, kind, episode=episode)
        self._store.count("retries")
        self._store.run(
            "UPDATE episodes SET state = 'pending', worker = NULL WHERE group_id = ? AND idx = ?", (group, idx)
        )
        return False

    def give_up(self, now: float, group: int, idx: int, kind: FailureKind, *, episode: Episode | None = None) -> bool:
        train = bool(self._store.number("SELECT purpose = 'train' FROM groups WHERE id = ?", group))
        samples = self._keep_samples(group, idx, episode, train=train) if episode is not None else 0
        self._store.run(
            "UPDATE episodes SET state = 'given_up', kind = ?, outcome = ?, ended_at = ?, samples = ? "
            "WHERE group_id = ? AND idx = ?",
            (kind, Outcome.FAILED, now, samples, group, idx),
        )
        by_policy = self._by_policy(episode, samples)
        self._store.event(now, "given_up", group=group, idx=idx, failure=kind, samples=by_policy)
        return self._groups.member_ended(now, group)

    def expired(self, now: float) -> list[tuple[int, int, str, bool]]:
        """Leases to end: (group, index, worker, True if by the time limit)."""
        return self._store.all(
            "SELECT group_id, idx, worker, deadline_at <= ? FROM episodes "
            "WHERE state = 'leased' AND (expires_at <= ? OR deadline_at <= ?)",
            now,
            now,
            now,
        )

    def expire_worker(self, worker: str) -> None:
        """Its leases run out at once, at the next sweep."""
        self._store.run("UPDATE episodes SET expires_at = 0 WHERE state = 'leased' AND worker = ?", (worker,))


def _sampled(episode: Episode) -> int:
    """Tokens that engines sampled for it."""
    spans = [span for each in episode.trajectories for sample in each.samples for span in sample.spans]
    return sum(span.stop - span.start for span in spans)


def parse_lease(lease: str) -> tuple[int, int, int]:
    """Raises BadRequest unless it is ``group/index/attempt``."""
    parts = lease.split("/")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) < 19 for part in parts):
        raise BadRequest(f"a lease id is group/index/attempt, found {lease[:60]!r}")
    return int(parts[0]), int(parts[1]), int(parts[2])


def episode_seed(seed: int, group: int, idx: int, attempt: int) -> int:
    """63 bits; no two siblings, attempts or runs share it (F65), and no process's ``hash`` is asked (F70)."""
    digest = hashlib.sha256(f"{seed}/{group}/{idx}/{attempt}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
