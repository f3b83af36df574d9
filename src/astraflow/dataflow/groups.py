"""Groups: admitted, closed by their last episode, settled per policy, and the queue of kept ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from astraflow.algorithms.base import PolicyRoom, ReadyGroup, Replay, StoredGroup
from astraflow.dataflow.policies import Policies
from astraflow.dataflow.settings import RunSpec
from astraflow.dataflow.settle import NOT_PLAYED, Verdict, asked
from astraflow.dataflow.store import Store
from astraflow.types import Purpose, Task
from astraflow.wire.codec import decode, encode

SUPERVISED = "supervised"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyRow:
    """A group whose last episode has ended, waiting to be settled."""

    group: int
    task: Task
    size: int
    arrival: int


class Groups:
    def __init__(self, store: Store, spec: RunSpec, policies: Policies) -> None:
        self._store = store
        self._spec = spec
        self._policies = policies
        select = spec.pipeline.select
        self._replay = select if isinstance(select, Replay) else None
        """Asked once: the check of a protocol reads all its members."""
        self._stored: dict[str, tuple[int, list[StoredGroup]]] = {}
        """Per policy what may be replayed, as of that many changes of versions; a memory of the tables."""
        store.on_rollback.append(self._stored.clear)

    def admit(
        self,
        now: float,
        *,
        task: Task,
        size: int,
        purpose: Purpose = Purpose.TRAIN,
        versions: Mapping[str, int] | None = None,
        eval_id: int | None = None,
        version_choice: float = 0.0,
    ) -> int:
        """Open a group with all its episodes pending; returns its id."""
        store = self._store
        supervised = int(task.workflow == SUPERVISED)
        lane = int(purpose is Purpose.EVAL)
        group = store.run(
            "INSERT INTO groups (purpose, state, size, left_episodes, supervised, task, task_key, versions, eval_id, "
            "opened_at) VALUES (?, 'open', ?, ?, ?, ?, ?, ?, ?, ?)",
            (purpose, size, size, supervised, encode(task), task.key, json.dumps(dict(versions or {})), eval_id, now),
        ).lastrowid
        assert group is not None
        if version_choice:
            store.run("INSERT INTO version_choices VALUES (?, ?)", (group, version_choice))
        if self._policies.cast:
            store.run("INSERT INTO casts VALUES (?, ?)", (group, json.dumps(self._policies.cast)))
        store.run_many(
            "INSERT INTO episodes (group_id, idx, state, lane, supervised) VALUES (?, ?, 'pending', ?, ?)",
            [(group, idx, lane, supervised) for idx in range(size)],
        )
        if purpose is Purpose.TRAIN:
            store.run_many(
                "INSERT INTO group_policy (group_id, policy, state) VALUES (?, ?, 'open')",
                [(group, policy) for policy in self._policies.trainable],
            )
        store.event(now, "admitted", group=group, purpose=purpose, size=size, task=task.key)
        return group

    def member_ended(self, now: float, group: int) -> bool:
        """One of its episodes is done or given up; True if it was the last, and the group is ready."""
        store = self._store
        left = store.number(
            "UPDATE groups SET left_episodes = left_episodes - 1 WHERE id = ? RETURNING left_episodes", group
        )
        if left > 0:
            return False
        arrival = int(store.get("arrivals") or 0) + 1
        store.set("arrivals", arrival)
        store.run(
            "UPDATE groups SET state = 'ready', arrival = ?, ended_at = ? WHERE id = ?",
            (arrival, now, group),
        )
        store.run("UPDATE group_policy SET state = 'ready', arrival = ? WHERE group_id = ?", (arrival, group))
        store.event(now, "ready", group=group, arrival=arrival)
        return True

    def close(self, group: int) -> None:
        self._store.run("UPDATE groups SET state = 'closed' WHERE id = ?", (group,))

    @property
    def any_ready(self) -> bool:
        return self._store.one("SELECT 1 FROM groups WHERE state = 'ready' AND purpose = 'train' LIMIT 1") is not None

    def ready(self) -> list[ReadyRow]:
        """Train groups to settle, in the order of closing."""
        return [
            ReadyRow(group=group, task=decode(task, Task), size=size, arrival=arrival)
            for group, task, size, arrival in self._store.all(
                "SELECT id, task, size, arrival FROM groups WHERE state = 'ready' AND purpose = 'train' "
                "ORDER BY arrival"
            )
        ]

    def settle(self, now: float, group: int, verdicts: Mapping[str, Verdict]) -> list[str]:
        """Write what each policy makes of a ready group; returns the policies that keep it."""
        kept = []
        opened = self.policies_of(group)
        for policy in opened:
            verdict = verdicts.get(policy)
            if verdict is None:
                self._drop(now, group, policy, NOT_PLAYED)
                continue
            self._mask(group, policy, verdict)
            mean = _mean_reward(verdict)
            self._store.run(
                "UPDATE group_policy SET min_version = ?, fresh_version = ?, reward = ?, verdict = ? "
                "WHERE group_id = ? AND policy = ?",
                (
                    verdict.summary.min_version,
                    verdict.newest,
                    mean,
                    verdict.advantages.tobytes() if verdict.reason is None else None,
                    group,
                    policy,
                ),
            )
            if verdict.reason is not None:
                self._drop(now, group, policy, verdict.reason, reward=mean)
                continue
            if self._is_stale(policy, verdict):
                self.make_stale(now, group, policy)
                continue
            kept.append(policy)
            self._store.run("UPDATE group_policy SET state = 'kept' WHERE group_id = ? AND policy = ?", (group, policy))
            self._store.event(now, "kept", group=group, policy=policy, reward=mean)
        self.close(group)
        self._count_barren(opened, kept)
        return kept

    def _is_stale(self, policy: str, verdict: Verdict) -> bool:
        age = 0 if verdict.newest is None else self._policies.versions[policy] - verdict.newest
        return age > self._policies.specs[policy].max_staleness

    def _count_barren(self, judged: Iterable[str], kept: list[str]) -> None:
        for policy in judged:
            self._store.run(
                "UPDATE policies SET barren = CASE WHEN ? THEN 0 ELSE barren + 1 END WHERE name = ?",
                (policy in kept, policy),
            )

    def policies_of(self, group: int) -> list[str]:
        """Those that it was opened for: what joined later is not among them."""
        rows = self._store.all("SELECT policy FROM group_policy WHERE group_id = ?", group)
        opened = {policy for (policy,) in rows}
        return [policy for policy in self._policies.trainable if policy in opened]

    def _mask(self, group: int, policy: str, verdict: Verdict) -> None:
        masked = [(each.masked, group, policy, *place_of(each.sample_id)) for each in verdict.samples if each.masked]
        self._store.run_many(
            "UPDATE samples SET mask = ? WHERE group_id = ? AND policy = ? AND idx = ? AND agent = ? AND n = ?", masked
        )

    def _drop(self, now: float, group: int, policy: str, reason: str, *, reward: float | None = None) -> None:
        self._store.run(
            "UPDATE group_policy SET state = 'dropped', reason = ?, verdict = NULL WHERE group_id = ? AND policy = ?",
            (reason, group, policy),
        )
        self._samples(group, policy, "dropped")
        self._store.event(now, "dropped", group=group, policy=policy, reason=reason, reward=reward)

    def _samples(self, group: int, policy: str, state: str) -> None:
        self._store.run(
            "UPDATE samples SET state = ? WHERE group_id = ? AND policy = ? AND state = 'held'", (state, group, policy)
        )

    # ── the kept queue ──

    def make_stale(self, now: float, group: int, policy: str) -> None:
        self._store.run(
            "UPDATE group_policy SET state = 'stale', verdict = NULL WHERE group_id = ? AND policy = ?", (group, policy)
        )
        self._samples(group, policy, "stale")
        self._store.event(now, "stale", group=group, policy=policy, version=self._policies.versions[policy])

    def sweep(self, now: float, policy: str) -> int:
        """Optimisation: kept groups of which nothing may be trained any more leave the queue before they are picked."""
        oldest = self._policies.versions[policy] - self._policies.specs[policy].max_staleness
        gone = self._store.all(
            "SELECT group_id FROM group_policy WHERE policy = ? AND state = 'kept' AND fresh_version < ?",
            policy,
            oldest,
        )
        for (group,) in gone:
            self.make_stale(now, group, policy)
        return len(gone)

    def drop_surplus(self, now: float, policy: str) -> int:
        """Beyond (max_staleness + 1) batches the queue could not be used before it is stale: oldest version first."""
        room = self._policies.specs[policy].room
        kept = self._store.all(
            "SELECT group_id FROM group_policy WHERE policy = ? AND state = 'kept' "
            "ORDER BY min_version IS NULL, min_version, arrival",
            policy,
        )
        surplus = kept[: max(0, len(kept) - room)]
        for (group,) in surplus:
            self._drop(now, group, policy, "surplus")
        return len(surplus)

    def kept(self, policy: str) -> list[ReadyGroup]:
        return [
            ReadyGroup(group=group, min_version=version, arrival=arrival)
            for group, version, arrival in self._store.all(
                "SELECT group_id, min_version, arrival FROM group_policy WHERE policy = ? AND state = 'kept' "
                "ORDER BY group_id",
                policy,
            )
        ]

    def stored(self, policy: str) -> list[StoredGroup]:
        """Trained, and young enough that something of them may be trained again from the current version."""
        changes = self._policies.changes
        found = self._stored.get(policy)
        if found is None or found[0] != changes:
            found = self._stored[policy] = (changes, self._read_stored(policy))
        return found[1]

    def _read_stored(self, policy: str) -> list[StoredGroup]:
        version = self._policies.versions[policy]
        return [
            StoredGroup(
                group=group,
                age=max(0, version - fresh),
                arrival=arrival,
                uses=uses,
                advantage=float(np.abs(np.frombuffer(verdict, np.float32)).mean()),
            )
            for group, fresh, arrival, verdict, uses in self._store.all(
                "SELECT group_id, fresh_version, arrival, verdict, "
                "(SELECT 1 + COALESCE(MAX(g.use), 0) FROM batch_groups g JOIN batches b ON b.id = g.batch "
                "WHERE g.use > 0 AND g.group_id = p.group_id AND b.policy = p.policy) "
                "FROM group_policy p WHERE policy = ? AND state = 'trained' AND fresh_version >= ? "
                "AND LENGTH(verdict) > 0 AND group_id NOT IN (SELECT group_id FROM pruned_groups) ORDER BY arrival",
                policy,
                version - self._policies.specs[policy].max_staleness,
            )
        ]

    def forget_stored(self, policy: str) -> None:
        """One of them is used once more."""
        self._stored.pop(policy, None)

    def _replayed(self, policy: str) -> int:
        if self._replay is None:
            return 0
        need = self._policies.specs[policy].groups_per_batch
        what = f"{type(self._replay).__name__}.share for policy {policy}"
        return asked(what, partial(self._replay.share, self.stored(policy), policy=policy, need=need))

    def _overtaken(self, policy: str) -> int:
        """Open groups behind which a whole batch of younger ones has closed. Looks at the newest and the open only."""
        return self._store.number(
            "SELECT COUNT(*) FROM groups g CROSS JOIN group_policy p ON p.group_id = g.id WHERE g.state = 'open' "
            "AND g.id < (SELECT id FROM groups WHERE arrival IS NOT NULL AND purpose = 'train' ORDER BY id DESC "
            "LIMIT 1 OFFSET ?) AND p.policy = ?",
            self._policies.specs[policy].groups_per_batch - 1,
            policy,
        )

    def oldest_open(self, policy: str) -> int | None:
        row = self._store.one(
            "SELECT MIN(group_id) FROM group_policy WHERE policy = ? AND state IN ('open', 'ready')", policy
        )
        return row[0] if row else None

    def rooms(self) -> dict[str, PolicyRoom]:
        """What Pace sees: trainable policies only."""
        alive = {
            (policy, state): count
            for policy, state, count in self._store.all(
                "SELECT policy, state, COUNT(*) FROM group_policy WHERE state IN ('open', 'ready', 'kept', 'batched') "
                "GROUP BY policy, state"
            )
        }
        return {
            policy: PolicyRoom(
                version=self._policies.versions[policy],
                max_staleness=self._policies.specs[policy].max_staleness,
                groups_per_batch=self._policies.specs[policy].groups_per_batch,
                open_groups=alive.get((policy, "open"), 0) + alive.get((policy, "ready"), 0),
                kept_groups=alive.get((policy, "kept"), 0),
                batched_groups=alive.get((policy, "batched"), 0),
                replayed_groups=self._replayed(policy),
                overtaken_groups=self._overtaken(policy),
                steps_left=max(0, self._policies.steps[policy] - self._policies.versions[policy]),
            )
            for policy in self._policies.trainable
        }


def place_of(sample_id: str) -> tuple[int, str, int]:
    """idx, agent, n of ``group/idx/agent/n``; an agent's name may hold slashes."""
    _, idx, rest = sample_id.split("/", 2)
    agent, _, n = rest.rpartition("/")
    return int(idx), agent, int(n)


def _mean_reward(verdict: Verdict) -> float | None:
    rewards = verdict.summary.units.reward[verdict.summary.units.counts]
    return float(np.mean(rewards)) if len(rewards) else None
