"""What a run forgets: the bytes of episodes and frozen batches that nothing can ask for again. Metadata never goes.

    group   closed, and for every trainable policy trained (covered, too old for a replay), dropped or stale
    batch   committed and covered, or dropped
    eval    done and covered, neither the first nor the last

Covered: the oldest checkpoint that the trainer keeps holds it, so that no resume can un-commit it. Trainers tell with
each commit; of one that has told nothing since it resumed, nothing is covered. Deciding is pure; the work is done in
slices, each in a transaction of its own, and files go after that transaction is on disk.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from astraflow.dataflow.ledger import Ledger
from astraflow.dataflow.store import Row, Store
from astraflow.errors import Pruned

log = logging.getLogger("astraflow.dataflow")

CHECKPOINT = "checkpoint"
"""``Limits.retain``"""
LOOKED_AT = 128
"""Groups, or batches, that one slice looks at."""
SLICE_BYTES = 4 << 20
"""About so much goes with one slice: a few milliseconds."""
FILES = 64
"""Files of an earlier process that one slice looks at."""


# ── deciding ──


@dataclass(frozen=True, kw_only=True, slots=True)
class Frontier:
    """How far back anybody may still go."""

    versions: Mapping[str, int]
    """Trainable policy → version of the oldest checkpoint kept. One that is missing covers nothing."""
    bounds: Mapping[str, int]
    """Policy → max_staleness: an older sample is never replayed."""
    before: float
    """Logical time by which all of these versions were committed: what ended later is kept, to be looked at."""
    evals: frozenset[int] = frozenset()
    """Evaluations whose text nobody needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What became of one group."""

    group: int
    closed: bool
    ended_at: float
    eval_id: int | None
    policies: Mapping[str, tuple[str, int | None, int | None]]
    """Trainable policy → (state, version that its step made, version of its freshest sample)."""


def is_spent(group: Standing, frontier: Frontier) -> bool:
    """Whether no resume, replay or reader needs its episodes."""
    if not group.closed:
        return False
    if group.eval_id is not None:
        return group.eval_id in frontier.evals
    if not group.policies or group.ended_at > frontier.before:
        return False
    return all(_is_through(policy, *how, frontier) for policy, how in group.policies.items())


def _is_through(policy: str, state: str, version: int | None, fresh: int | None, frontier: Frontier) -> bool:
    if state in ("dropped", "stale"):
        return True
    oldest = frontier.versions.get(policy)
    if state != "trained" or version is None or oldest is None:
        return False
    return version <= oldest and (fresh is None or oldest - fresh > frontier.bounds[policy])


def spent_evals(done: Sequence[tuple[int, int]], oldest: int | None) -> frozenset[int]:
    """Of (version, id) of finished evaluations: covered ones, but the first and the last are shown side by side."""
    if oldest is None:
        return frozenset()
    between = sorted(done)[1:-1]
    return frozenset(each for version, each in between if version < oldest)


# ── what trainers say ──


def checkpoint_kept(store: Store, policy: str, version: int | None, oldest: int | None) -> None:
    """The trainer at ``version`` says which checkpoint is the oldest that it keeps; None: it has none."""
    if oldest is not None and version is not None and 0 < oldest <= version:
        store.set(_key(policy), oldest)


def forget_checkpoint(store: Store, policy: str) -> None:
    """Another trainer, or another history: it must tell anew."""
    store.run("DELETE FROM meta WHERE key = ?", (_key(policy),))


def require_bytes(store: Store, policy: str, version: int, what: str) -> None:
    """Raises Pruned if the steps after ``version`` could not be repeated."""
    row = store.one(
        "SELECT MAX(version) FROM batches WHERE policy = ? AND state = 'committed' AND version >= ? "
        "AND rows IS NULL AND file IS NULL",
        policy,
        version,
    )
    if row is not None and row[0] is not None:
        raise Pruned(
            f"{what} cannot go back to version {version}: the data of its steps up to {row[0] + 1} is pruned, because "
            f"its trainer had a checkpoint of version {row[0] + 1} or later; go back no further than {row[0] + 1} "
            "(limits.retain='all' keeps everything)"
        )


def _key(policy: str) -> str:
    return f"oldest_checkpoint/{policy}"


# ── doing it ──


class Retention:
    """``begin`` with every tick, ``prune`` until it answers False, ``remove_files`` once that is on disk."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._store = ledger.store
        self._frontier: Frontier | None = None
        self._cursor: int | None = None
        """Group up to which this round has looked; None: it is over."""
        self._doomed: list[str] = []
        self._orphans = ledger.payloads.names()
        """Files of an earlier process: one that died between a transaction and its files left garbage."""

    def begin(self) -> None:
        """A new round, if anything has become spent since the last one."""
        if self._ledger.spec.limits.retain != CHECKPOINT:
            return
        frontier = self._look()
        if frontier is not None and frontier != self._frontier:
            self._frontier = frontier
            self._cursor = 0

    def prune(self, now: float) -> bool:
        """One slice; True if there is more to do."""
        frontier, cursor = self._frontier, self._cursor
        if self._orphans:
            self._doomed += self._orphans[:FILES]
            del self._orphans[:FILES]
        if frontier is None or cursor is None:
            return bool(self._orphans)
        left = SLICE_BYTES - self._prune_batches(now, frontier)
        standings = self._standings(cursor)
        for standing in standings:
            if left <= 0:
                return True
            if is_spent(standing, frontier):
                left -= self._prune_group(now, standing.group)
            self._cursor = standing.group
        if left > 0 and len(standings) < LOOKED_AT:
            self._cursor = None
        return self._cursor is not None or bool(self._orphans)

    def remove_files(self) -> None:
        """Of rows that are gone, on disk; a name that another row has as well stays."""
        doomed, self._doomed = self._doomed, []
        for name in doomed:
            try:
                self._ledger.payloads.remove(name)
            except (OSError, sqlite3.Error) as error:  # a file that cannot be removed costs space, nothing else
                log.warning("payload_not_removed file=%s error=%s", name, error)

    def forget(self) -> None:
        """The transaction was rolled back: its rows are there still, and the round begins again."""
        self._doomed.clear()
        self._frontier = None

    # ── reading ──

    def _look(self) -> Frontier | None:
        """None: some trainer has not told which checkpoint is its oldest."""
        spec, store = self._ledger.spec, self._store
        versions: dict[str, int] = {}
        times: list[float] = []
        for policy in self._ledger.policies.trainable:
            oldest = store.get(_key(policy))
            row = None
            if oldest is not None:
                row = store.one(
                    "SELECT ended_at FROM batches WHERE policy = ? AND state = 'committed' AND version = ?",
                    policy,
                    oldest - 1,
                )
            if row is None:
                return None
            versions[policy] = oldest
            times.append(row[0])
        if not versions:
            return None
        done = store.all("SELECT version, id FROM evals WHERE state = 'done' AND policy = ?", spec.evaluated)
        return Frontier(
            versions=versions,
            bounds={policy: self._ledger.policies.specs[policy].max_staleness for policy in versions},
            before=min(times),
            evals=spent_evals(done, versions.get(spec.evaluated)),
        )

    def _standings(self, after: int) -> list[Standing]:
        """The next groups with bytes, by id: the table of bytes holds nothing else."""
        found: dict[int, list[Row]] = {}
        for row in self._store.all(
            "SELECT g.id, g.state = 'closed', g.ended_at, g.eval_id, p.policy, p.state, p.version, p.fresh_version "
            "FROM (SELECT DISTINCT group_id FROM payloads WHERE group_id > ? ORDER BY group_id LIMIT ?) b "
            "JOIN groups g ON g.id = b.group_id LEFT JOIN group_policy p ON p.group_id = g.id ORDER BY g.id",
            after,
            LOOKED_AT,
        ):
            found.setdefault(row[0], []).append(row)
        return [
            Standing(
                group=group,
                closed=bool(rows[0][1]),
                ended_at=rows[0][2] or 0.0,
                eval_id=rows[0][3],
                policies={row[4]: (row[5], row[6], row[7]) for row in rows if row[4] is not None},
            )
            for group, rows in found.items()
        ]

    # ── writing ──

    def _prune_group(self, now: float, group: int) -> int:
        store = self._store
        rows = store.all("SELECT bytes, file FROM payloads WHERE group_id = ?", group)
        size = sum(int(row[0]) for row in rows)
        store.run("DELETE FROM payloads WHERE group_id = ?", (group,))
        store.run("INSERT OR REPLACE INTO pruned_groups VALUES (?, ?, ?, ?)", (group, len(rows), size, now))
        store.event(now, "pruned", group=group, episodes=len(rows), bytes=size)
        self._doomed += [file for _, file in rows if file is not None]
        return size

    def _prune_batches(self, now: float, frontier: Frontier) -> int:
        store, gone = self._store, 0
        for policy, oldest in frontier.versions.items():
            spent = store.all(
                "SELECT id, file, rows FROM batches "
                "WHERE (rows IS NOT NULL OR file IS NOT NULL) "
                "AND policy = ? AND (state = 'dropped' OR (state = 'committed' AND version < ?)) LIMIT ?",
                policy,
                oldest,
                LOOKED_AT,
            )
            for batch, file, size in spent:
                store.run("UPDATE batches SET rows = NULL, file = NULL WHERE id = ?", (batch,))
                store.run("DELETE FROM batch_rows WHERE batch = ?", (batch,))
                store.event(now, "pruned", policy=policy, batch=batch)
                self._doomed += [file] if file is not None else []
                gone += int(size or 0)
                if gone >= SLICE_BYTES:
                    return gone
            if len(spent) == LOOKED_AT:
                return SLICE_BYTES
        return gone
