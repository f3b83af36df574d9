"""What a run's ledger tells of its past, as a replay needs it: events in their order, groups and what was made in them.

Episodes whose bytes were pruned are rebuilt from the tables: their scores as rewards, one turn a sample. With several
roles or rewards a turn, that is an approximation; ``rebuilt`` says of which groups.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from astraflow.dataflow.retelling import Told
from astraflow.errors import ConfigError
from astraflow.run.run_db import RunDb
from astraflow.types import Episode, Outcome, Sample, SampleKind, Span, Task, Trajectory, Turn
from astraflow.wire.codec import decode

UNSCORED = "unscored"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What became of a group for one policy."""

    state: str
    reason: str | None
    min_version: int | None
    version: int | None
    """Of a trained one: the version that its step made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedGroup:
    """A training group that was admitted."""

    group: int
    task: Task
    size: int
    arrival: int | None
    """None: its last episode never came."""
    places: dict[str, Place]


@dataclass(kw_only=True, slots=True)
class Record:
    """One run's past. ``episodes`` reads the members of a group."""

    groups: dict[int, RecordedGroup]
    events: Callable[[], Iterator[Told]]
    episodes: Callable[[int], list[Episode | None]]
    ages: dict[str, list[int]]
    """Policy → age at use of every trained sample."""
    masks: dict[tuple[int, str], dict[str, str]] = field(default_factory=dict)
    """(group, policy) → sample_id → why it takes no gradient; of groups in which there is such a sample."""
    trained: dict[tuple[int, str], int] = field(default_factory=dict)
    """(group, policy) → episodes of which a sample was trained; 0 where absent."""
    rebuilt: set[int] = field(default_factory=set)


def read_record(db: RunDb, payloads: Any) -> Record:
    """``payloads``: the folder of large ones. The database must stay open while the record is used. Raises ConfigError
    for a run that policies joined."""
    if joined := db.joined():
        raise ConfigError(
            f"{', '.join(joined)} joined this run while it went on: its recipe does not tell what would have come of "
            "that under other algorithms, so it cannot be replayed"
        )
    groups = _groups(db)
    rebuilt: set[int] = set()

    def episodes(group: int) -> list[Episode | None]:
        members = [db.episode(group, idx, payloads) for idx in range(groups[group].size)]
        done = {idx for (idx,) in db.connection.execute(
            "SELECT idx FROM episodes WHERE group_id = ? AND state = 'done'", (group,)
        )}  # fmt: skip
        for idx in sorted(done):
            if members[idx] is None:
                members[idx] = _rebuilt(db, groups[group], idx)
                rebuilt.add(group)
        return members

    ages: dict[str, list[int]] = {}
    for policy, age in db.connection.execute(
        "SELECT policy, age FROM samples WHERE age IS NOT NULL AND state = 'trained'"
    ):
        ages.setdefault(policy, []).append(age)
    return Record(
        groups=groups,
        events=lambda: _events(db),
        episodes=episodes,
        ages=ages,
        masks=_masks(db),
        trained=_trained(db),
        rebuilt=rebuilt,
    )


def _masks(db: RunDb) -> dict[tuple[int, str], dict[str, str]]:
    masks: dict[tuple[int, str], dict[str, str]] = {}
    for group, policy, idx, agent, n, mask in db.connection.execute(
        "SELECT group_id, policy, idx, agent, n, mask FROM samples WHERE mask IS NOT NULL"
    ):
        masks.setdefault((group, policy), {})[f"{group}/{idx}/{agent}/{n}"] = mask
    return masks


def _trained(db: RunDb) -> dict[tuple[int, str], int]:
    rows = db.connection.execute(
        "SELECT group_id, policy, COUNT(DISTINCT idx) FROM samples WHERE state = 'trained' GROUP BY group_id, policy"
    )
    return {(group, policy): episodes for group, policy, episodes in rows}


def _groups(db: RunDb) -> dict[int, RecordedGroup]:
    places: dict[int, dict[str, Place]] = {}
    for group, policy, state, reason, oldest, version in db.connection.execute(
        "SELECT group_id, policy, state, reason, min_version, version FROM group_policy ORDER BY group_id, policy"
    ):
        place = Place(state=state, reason=reason, min_version=oldest, version=version)
        places.setdefault(group, {})[policy] = place
    return {
        group: RecordedGroup(
            group=group, task=decode(task, Task), size=size, arrival=arrival, places=places.get(group, {})
        )
        for group, task, size, arrival in db.connection.execute(
            "SELECT id, task, size, arrival FROM groups WHERE purpose = 'train' ORDER BY id"
        )
    }


def _events(db: RunDb) -> Iterator[Told]:
    rows = db.connection.execute("SELECT id, kind, group_id, idx, policy, batch, data FROM events ORDER BY id")
    for number, kind, group, idx, policy, batch, data in rows:
        yield Told(
            id=number,
            kind=kind,
            group=group,
            idx=idx,
            policy=policy,
            batch=batch,
            data=json.loads(data) if data else {},
        )


def _rebuilt(db: RunDb, group: RecordedGroup, idx: int) -> Episode:
    """From what is never pruned: outcome, score, and of each sample its tokens and oldest version."""
    outcome, score = db.connection.execute(
        "SELECT outcome, score FROM episodes WHERE group_id = ? AND idx = ?", (group.group, idx)
    ).fetchone()
    rows = db.connection.execute(
        "SELECT policy, agent, tokens, min_version, mask FROM samples WHERE group_id = ? AND idx = ? "
        "ORDER BY policy, agent, n",
        (group.group, idx),
    ).fetchall()
    samples: dict[tuple[str, str], list[tuple[int, int | None, str | None]]] = {}
    for policy, agent, tokens, version, mask in rows:
        samples.setdefault((policy, agent), []).append((tokens, version, mask))
    return Episode(
        task_key=group.task.key,
        outcome=Outcome(outcome),
        score=score,
        trajectories=tuple(_trajectory(*name, found, score) for name, found in samples.items()),
    )


def _trajectory(
    policy: str, agent: str, rows: list[tuple[int, int | None, str | None]], score: float | None
) -> Trajectory:
    samples = tuple(_sample(tokens, version) for tokens, version, _ in rows)
    turns = tuple(
        Turn(index=n, sample=n, start=1, stop=1 + tokens, reward=None if mask == UNSCORED else score)
        for n, (tokens, version, mask) in enumerate(rows)
        if version is not None
    )
    return Trajectory(agent=agent, role=agent.partition("#")[0], policy=policy, samples=samples, turns=turns)


def _sample(tokens: int, version: int | None) -> Sample:
    sampled = np.arange(tokens + 1) > 0
    rl = version is not None
    return Sample(
        tokens=np.zeros(tokens + 1, np.int32),
        sampled=sampled,
        logprobs=np.zeros(tokens + 1, np.float32),
        spans=(Span(start=1, stop=1 + tokens, version=version, digest=""),) if version is not None and tokens else (),
        kind=SampleKind.RL if rl else SampleKind.SUPERVISED,
    )
