"""Questions to a run's database, read-only and beside whoever writes it. Times are seconds of dataflow's clock."""

from __future__ import annotations

import json
import sqlite3
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from astraflow.errors import ConfigError, NotFound
from astraflow.types import Episode, Manifest
from astraflow.wire.codec import decode

CHECK_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One committed optimiser step."""

    policy: str
    step: int
    """From 1; it made version ``step``."""
    batch: int
    at_s: float
    metrics: dict[str, float]
    reward: float | None
    """Mean reward of this policy in the training groups that ended since its step before, kept or not."""
    episodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    id: int
    policy: str
    version: int
    digest: str
    dataset: str
    score: float
    coverage: float
    episodes: int
    at_s: float
    pass_at: dict[str, float]
    """k → pass@k, where a task had several episodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """When the run began to work and when it last committed."""

    first_lease_s: float | None
    last_commit_s: float | None

    @property
    def rl_wall_s(self) -> float | None:
        if self.first_lease_s is None or self.last_commit_s is None:
            return None
        return self.last_commit_s - self.first_lease_s


class _Values:
    """In the order of time, so that a span of it is found in a few comparisons."""

    def __init__(self, rows: Sequence[tuple[float, float]]) -> None:
        """(time, value)"""
        self._times = [at for at, _ in rows]
        self._values = [value for _, value in rows]

    def mean(self, after: float, until: float) -> float | None:
        """Of what came later than ``after`` and not later than ``until``."""
        found = self._values[bisect_right(self._times, after) : bisect_right(self._times, until)]
        return sum(found) / len(found) if found else None


class RunDb:
    """A connection that can only read."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def span(self) -> Span:
        first = self._value("SELECT MIN(at) FROM events WHERE kind = 'leased'")
        last = self._value("SELECT MAX(ended_at) FROM batches WHERE state = 'committed'")
        return Span(first_lease_s=first, last_commit_s=last)

    def steps(self, from_s: float = 0.0) -> list[Step]:
        """Of the surviving history, by time; ``from_s``: those committed at that time or later."""
        rows = self.connection.execute(
            "SELECT policy, version + 1, id, ended_at, metrics FROM batches WHERE state = 'committed' "
            "AND ended_at >= ? ORDER BY ended_at, id",
            (from_s,),
        ).fetchall()
        if not rows:
            return []
        before = self._last_commits(from_s)
        since = min(before.get(row[0], -1.0) for row in rows)
        ends, rewards = self._ends(since), self._rewards(since)
        found: list[Step] = []
        for policy, step, batch, at, metrics in rows:
            first = before.get(policy, -1.0)
            before[policy] = at
            reward = rewards.get(policy, _Values(()))
            found.append(
                Step(
                    policy=policy,
                    step=step,
                    batch=batch,
                    at_s=at,
                    metrics=json.loads(metrics) if metrics else {},
                    reward=reward.mean(first, at),
                    episodes=bisect_right(ends, at) - bisect_right(ends, first),
                )
            )
        return found

    def _last_commits(self, before_s: float) -> dict[str, float]:
        """By policy, the last step that was committed earlier."""
        return dict(
            self.connection.execute(
                "SELECT policy, MAX(ended_at) FROM batches WHERE state = 'committed' AND ended_at < ? GROUP BY policy",
                (before_s,),
            ).fetchall()
        )

    def _ends(self, since: float) -> list[float]:
        """When each scored training episode ended, in order."""
        rows = self.connection.execute(
            "SELECT ended_at FROM episodes WHERE lane = 0 AND state = 'done' AND supervised = 0 AND score IS NOT NULL "
            "AND ended_at > ? ORDER BY ended_at",
            (since,),
        )
        return [at for (at,) in rows]

    def _rewards(self, since: float) -> dict[str, _Values]:
        """Policy → mean reward and end of every training group that it was rewarded in."""
        found: dict[str, list[tuple[float, float]]] = {}
        for policy, ended_at, reward in self.connection.execute(
            "SELECT p.policy, g.ended_at, p.reward FROM group_policy p JOIN groups g ON g.id = p.group_id "
            "WHERE g.supervised = 0 AND g.ended_at > ? AND p.reward IS NOT NULL ORDER BY g.ended_at",
            (since,),
        ):
            found.setdefault(policy, []).append((ended_at, reward))
        return {policy: _Values(rows) for policy, rows in found.items()}

    def evaluations(self) -> list[Evaluation]:
        """Finished ones of the surviving history, by policy and version; an undone version is none."""
        rows = self.connection.execute(
            "SELECT id, policy, version, digest, dataset, score, coverage, episodes, ended_at, "
            "(SELECT value FROM meta WHERE key = 'pass_at/' || e.id) FROM evals e "
            "WHERE state = 'done' AND score IS NOT NULL AND (version = 0 OR EXISTS (SELECT 1 FROM batches b "
            "JOIN publications p ON p.policy = b.policy AND p.serial = b.serial WHERE b.policy = e.policy "
            "AND b.state = 'committed' AND b.version = e.version - 1 AND p.digest = e.digest)) "
            "ORDER BY policy, version"
        ).fetchall()
        names = ("id", "policy", "version", "digest", "dataset", "score", "coverage", "episodes", "at_s")
        return [
            Evaluation(**dict(zip(names, row[:-1], strict=True)), pass_at=json.loads(row[-1]) if row[-1] else {})
            for row in rows
        ]

    def events(self, after: int, limit: int = 10000) -> list[dict[str, Any]]:
        """Plain dicts, oldest first; places that are empty are left out."""
        rows = self.connection.execute(
            "SELECT id, at, kind, group_id, idx, policy, batch, data FROM events WHERE id > ? ORDER BY id LIMIT ?",
            (after, limit),
        ).fetchall()
        return [_event(row) for row in rows]

    def events_of(self, group: int) -> list[dict[str, Any]]:
        rows = self.connection.execute(
            "SELECT id, at, kind, group_id, idx, policy, batch, data FROM events WHERE group_id = ? OR batch IN "
            "(SELECT batch FROM group_policy WHERE group_id = ? AND batch IS NOT NULL "
            "UNION SELECT batch FROM batch_groups WHERE group_id = ? AND use > 0) ORDER BY id",
            (group, group, group),
        ).fetchall()
        return [_event(row) for row in rows]

    def group(self, group: int) -> dict[str, Any]:
        """Raises NotFound."""
        row = self.connection.execute(
            "SELECT purpose, state, size, task_key, versions FROM groups WHERE id = ?", (group,)
        ).fetchone()
        if row is None:
            newest = self._value("SELECT MAX(id) FROM groups")
            raise NotFound(f"there is no group {group} in this run; the newest is {newest}")
        found = dict(zip(("purpose", "state", "size", "task", "versions"), row, strict=True))
        policies = self.connection.execute(
            "SELECT policy, state, reason, batch, version, reward FROM group_policy WHERE group_id = ?", (group,)
        ).fetchall()
        names = ("policy", "state", "reason", "batch", "version", "reward")
        return {**found, "policies": [dict(zip(names, each, strict=True)) for each in policies]}

    def episode(self, group: int, index: int, payloads: Path) -> Episode | None:
        """None: nothing is stored, or it was pruned."""
        row = self.connection.execute(
            "SELECT file, body FROM payloads WHERE group_id = ? AND idx = ?", (group, index)
        ).fetchone()
        if row is None:
            return None
        body = row[1] if row[1] is not None else _read(payloads / str(row[0]))
        return None if body is None else decode(body, Episode, limit_bytes=1 << 32)

    def pruned(self, group: int) -> dict[str, Any] | None:
        """When its bytes went, and how many they were; None: they are there, or never were."""
        row = self.connection.execute(
            "SELECT at, episodes, bytes FROM pruned_groups WHERE group_id = ?", (group,)
        ).fetchone()
        return None if row is None else dict(zip(("at_s", "episodes", "bytes"), row, strict=True))

    def known(self, group: int, index: int) -> dict[str, Any]:
        """What the tables say of an episode, whether its bytes are there or not."""
        row = self.connection.execute(
            "SELECT state, outcome, kind, score, attempt, worker FROM episodes WHERE group_id = ? AND idx = ?",
            (group, index),
        ).fetchone()
        samples = self.connection.execute(
            "SELECT policy, agent, n, state, mask, tokens, min_version, age FROM samples "
            "WHERE group_id = ? AND idx = ? ORDER BY policy, agent, n",
            (group, index),
        ).fetchall()
        names = ("policy", "agent", "n", "state", "mask", "tokens", "min_version", "age")
        found = dict(zip(("state", "outcome", "kind", "score", "attempt", "worker"), row, strict=True))
        return {**found, "samples": [dict(zip(names, sample, strict=True)) for sample in samples]}

    def joined(self) -> dict[str, str]:
        """Policies that joined while the run went on → which of the recipe each is like."""
        rows = self.connection.execute("SELECT value FROM meta WHERE key GLOB 'added/*' ORDER BY key").fetchall()
        return {each["name"]: each["like"] for each in map(json.loads, (text for (text,) in rows))}

    def manifest(self, policy: str, version: int | None) -> Manifest:
        """The newest publication of a version, or of all. Raises NotFound."""
        condition, values = ("", (policy,)) if version is None else (" AND version = ?", (policy, version))
        row = self.connection.execute(
            f"SELECT manifest FROM publications WHERE policy = ?{condition} ORDER BY serial DESC LIMIT 1", values
        ).fetchone()
        if row is None:
            wanted = "nothing" if version is None else f"no version {version}"
            raise NotFound(f"{wanted} of policy {policy!r} was published in this run")
        return decode(row[0], Manifest)

    def _value(self, sql: str) -> Any:
        row = self.connection.execute(sql).fetchone()
        return row[0] if row else None


@contextmanager
def open_run_db(database: Path) -> Iterator[RunDb]:
    """As it is at one moment. Raises ConfigError when there is none, it is not a run's, or what is asked below cannot
    be read of it."""
    if not database.exists():
        raise ConfigError(f"{database} is missing: is this a run folder that was started?")
    with readable(database), closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True)) as connection:
        connection.execute("PRAGMA busy_timeout = 5000")
        connection.execute("SELECT 1 FROM events LIMIT 1")
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'pruned_groups'").fetchall():
            connection.execute("CREATE TEMP TABLE pruned_groups (group_id, episodes, bytes, at)")  # of an older program
        connection.execute("BEGIN")  # all answers are of one moment of a run that goes on
        yield RunDb(connection)


def require_sound(database: Path, *, limit_s: float = CHECK_S) -> None:
    """Raises ConfigError if the file is damaged, as far as is seen in so many seconds: to write on in it would lose
    more. A file that is not there yet is sound."""
    if not database.exists():
        return
    until = time.monotonic() + limit_s
    with readable(database), closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True)) as connection:
        connection.set_progress_handler(lambda: time.monotonic() >= until, 100_000)
        try:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorname != "SQLITE_INTERRUPT":
                raise
            return
    if found != "ok":
        words = " ".join(found.replace("***", "").split())
        raise ConfigError(f"{database} is damaged: {words}; restore the run folder from a copy, or start a new run")


@contextmanager
def readable(database: Path) -> Iterator[None]:
    """Whatever SQLite says of the file below is a ConfigError: which file, what is wrong, what to do."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"{database} cannot be read: {error}; {_mend(error)}") from error


def holds_nothing(error: ConfigError) -> bool:
    """Whether ``readable`` found a file in which no run has begun: its process ended before there were tables."""
    return "no such table" in str(error.__cause__)


def _mend(error: sqlite3.DatabaseError) -> str:
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT", "SQLITE_IOERR")):
        return "it is damaged: restore the run folder from a copy, or start a new run"
    if name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")):
        return "this user must be able to read it, and to write in its folder"
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return "another program holds it: end that one, or ask again"
    return "it is not of a run, of none that has begun, or of another version of AstraFlow"


def _event(row: tuple[Any, ...]) -> dict[str, Any]:
    event_id, at, kind, group, index, policy, batch, data = row
    found: dict[str, Any] = {"id": event_id, "at_s": at, "kind": kind}
    places = {"group": group, "index": index, "policy": policy, "batch": batch}
    found |= {name: value for name, value in places.items() if value is not None}
    return {**(json.loads(data) if data else {}), **found}


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None
