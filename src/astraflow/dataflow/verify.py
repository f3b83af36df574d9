"""Do the tables say what the events tell? Every state is told again from the log, and each difference is one line.

Reads one snapshot, beside whoever writes. Where an event of an older program did not say enough, nothing is compared.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astraflow.dataflow.retelling import GroupStory, PolicyStory, Retelling, Told
from astraflow.dataflow.tally import NOT_TOLD, Tally, state_digest


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    events: int
    """Told again."""
    rows: int
    """Of the tables, compared."""
    differences: tuple[str, ...]
    not_compared: tuple[str, ...]
    """What is stored and no event tells, in words."""


class Comparison:
    """Collects what differs."""

    def __init__(self) -> None:
        self.rows = 0
        self.differences: list[str] = []

    def same(self, what: str, found: dict[str, Any] | None, told: dict[str, Any] | None) -> None:
        """One row; None: there is none."""
        self.rows += 1
        if found is None or told is None:
            if found is not told:
                side = "the events tell of it, no row does" if found is None else "a row that no event tells of"
                self.differences.append(f"{what}: {side}")
            return
        for name, expected in told.items():
            if found[name] != expected:
                self.differences.append(f"{what}: {name} is {found[name]!r}, the events tell {expected!r}")


def verify(db: sqlite3.Connection, payloads: Path | None = None) -> Verification:
    """``payloads``: the folder of episode files, whose presence is then looked at too."""
    began = not db.in_transaction
    if began:
        db.execute("BEGIN")
    try:
        known = db.execute(
            "SELECT name, trainable FROM policies WHERE NOT EXISTS (SELECT 1 FROM meta WHERE key = 'added/' || name)"
        ).fetchall()
        story = Retelling([name for name, _ in known], [name for name, trainable in known if trainable])
        supervised = {group for (group,) in db.execute("SELECT id FROM groups WHERE supervised")}
        tally = Tally(story.streams, supervised)
        count = 0
        for event in _events(db, story):
            tally.tell(event, story)
            story.tell(event)
            count += 1
        seen = Comparison()
        for compare in (_run, _policies, _publications, _trainers, _components, _evals, _groups, _batches):
            compare(db, story, seen)
        _group_policies(db, story, seen)
        _episodes(db, story, seen)
        _samples(db, story, seen)
        _bytes(db, story, seen, payloads)
        _frozen(db, seen, payloads)
        not_compared = [*_counters(db, tally, seen), *_in_a_row(db, tally, seen), *_algorithms(db, tally, seen)]
    finally:
        if began:
            db.execute("ROLLBACK")
    return Verification(
        events=count,
        rows=seen.rows,
        differences=(*story.breaks, *seen.differences),
        not_compared=tuple(not_compared),
    )


def _events(db: sqlite3.Connection, story: Retelling) -> Iterator[Told]:
    for number, kind, group, idx, policy, batch, text in db.execute(
        "SELECT id, kind, group_id, idx, policy, batch, data FROM events ORDER BY id"
    ):
        try:
            data = json.loads(text) if text else {}
        except ValueError:
            story.breaks.append(f"event {number} ({kind}) cannot be read")
            data = {}
        yield Told(id=number, kind=kind, group=group, idx=idx, policy=policy, batch=batch, data=data)


def _table(db: sqlite3.Connection, keys: int, sql: str) -> dict[Any, dict[str, Any]]:
    """Rows by their first ``keys`` columns, the others by name."""
    cursor = db.execute(sql)
    names = [column[0] for column in cursor.description][keys:]
    return {(row[0] if keys == 1 else row[:keys]): dict(zip(names, row[keys:], strict=True)) for row in cursor}


def _compare(seen: Comparison, what: str, found: dict[Any, dict[str, Any]], told: dict[Any, dict[str, Any]]) -> None:
    for key in sorted(found.keys() | told.keys()):
        name = "/".join(map(str, key)) if isinstance(key, tuple) else str(key)
        seen.same(f"{what} {name}", found.get(key), told.get(key))


def _run(db: sqlite3.Connection, story: Retelling, seen: Comparison) -> None:
    row = db.execute("SELECT value FROM meta WHERE key = 'state'").fetchone()
    seen.same("run", {"state": row[0] if row else None}, {"state": story.run_state})


def _policies(db: sqlite3.Connection, story: Retelling, seen: Comparison) -> None:
    told = {
        name: {"version": each.version, "serial": each.serial, "trainer_epoch": each.trainer_epoch}
        for name, each in story.streams.items()
    }
    _compare(seen, "policy", _table(db, 1, "SELECT name, version, serial, trainer_epoch FROM policies"), told)


def _publications(db: sqlite3.Connection, story: Retelling, seen: Comparison) -> None:
    told = {key: {"version": version, "digest": digest} for key, (version, digest) in story.publications.items()}
    _compare(seen, "publication", _table(db, 2, "SELECT policy, serial, version, digest FROM publications"), told)


def _trainers(db: sqlite3.Connection, story: Retelling, seen: Comparison) -> None:
    told = {
        policy: dict(zip(("name", "version", "trainer_epoch"), stream.trainer, strict=True))
        for policy, stream in story.streams.items()
        if stream.trainer is not None
    }
    _compare(seen, "trainer of", _table(db, 1, "SELECT policy, name, version, trainer_epoch FROM trainers"), told)


def _components(db: sqlite3.Connection, story: Retelling, seen: Comparison) -> None:
    told = {key: {"state": state} for key, state in story.components.items()}
    _compare(seen, "component", _table(db, 2, "SELECT component, name, state FROM components"), told)


def _evals(db: sqlite3.Connection, story: Retelling, seen: Comparison) -> None:
    told = {
        number: {
            "policy": each.policy,
            "version": each.version,
            "state": each.state,
            "score": each.score,
            "coverage": each.coverage,
        }
        for number, each in story.evals.items()
    }
    _compare(seen, "eval", _table(db, 1, "SELECT id, policy, version, state, score, coverage FROM evals"), told)


def _groups(db: sqlite3.Connection, story: Retelling, seen: Comparison) -> None:
    found = _table(db, 1, "SELECT id, purpose, state, size, left_episodes, task_key, arrival FROM groups")
    told = {
        number: {
            "purpose": each.purpose,
            "state": each.state,
            "size": each.size,
            "left_episodes": each.left,
            "task_key": each.task,
            "arrival": each.arrival,
        }
        for number, each in story.groups.items()
    }
    _compare(seen, "group", found, told)


def _group_policies(db: sqlite3.Connection, story: Retelling, seen: Comparison) -> None:
    found = _table(db, 2, "SELECT group_id, policy, state, reason, batch, version FROM group_policy")
    told = {
        (number, policy): {
            "state": each.state,
            "reason": each.reason,
            "batch": each.batch,
            "version": each.version,
        }
        for number, group in story.groups.items()
        for policy, each in group.policies.items()
    }
    _compare(seen, "group of policy", found, told)


def _episodes(db: sqlite3.Connection, story: Retelling, seen: Comparison) -> None:
    found = _table(
        db, 2, "SELECT group_id, idx, state, attempt, failures, worker, outcome, kind, score, samples FROM episodes"
    )
    told: dict[Any, dict[str, Any]] = {}
    for number, group in story.groups.items():
        for idx, each in enumerate(group.episodes):
            row: dict[str, Any] = {"state": each.state, "attempt": each.attempt, "failures": each.failures}
            if each.state == "leased":
                row["worker"] = each.worker
            elif each.state == "done":
                row |= {"outcome": each.outcome, "score": each.score, "worker": each.worker}
            elif each.state == "given_up":
                row["kind"] = each.kind
            if each.samples is not None:
                row["samples"] = sum(each.samples.values())
            told[number, idx] = row
    _compare(seen, "episode", found, told)


def _batches(db: sqlite3.Connection, story: Retelling, seen: Comparison) -> None:
    found = _table(
        db, 1, "SELECT id, policy, state, reason, version, trainer_epoch, failures, tokens, sequences, "
        "rows IS NULL AND file IS NULL AS pruned FROM batches",
    )  # fmt: skip
    members: dict[int, list[int]] = {}
    for number, group in db.execute("SELECT batch, group_id FROM batch_groups ORDER BY batch, position"):
        members.setdefault(number, []).append(group)
    for number, row in found.items():
        row["groups"] = members.get(number, [])
    told = {
        number: {
            "policy": each.policy,
            "state": each.state,
            "reason": each.reason,
            "version": each.version,
            "trainer_epoch": each.trainer_epoch,
            "failures": each.failures,
            "tokens": each.tokens,
            "sequences": each.sequences,
            "pruned": int(each.pruned),
            "groups": list(each.groups),
        }
        for number, each in story.batches.items()
    }
    _compare(seen, "batch", found, told)


def _samples(db: sqlite3.Connection, story: Retelling, seen: Comparison) -> None:
    """How many of each group are in which state, per policy."""
    found: dict[Any, dict[str, int]] = {}
    for group, policy, state, count in db.execute(
        "SELECT group_id, policy, state, COUNT(*) FROM samples GROUP BY group_id, policy, state"
    ):
        found.setdefault((group, policy), {})[state] = count
    for number, group in story.groups.items():
        for policy, each in group.policies.items():
            told = _sample_states(group, policy, each)
            if told is not None:
                rows = found.pop((number, policy), {})
                seen.same(f"samples of group {number} of {policy}", {"count": rows}, {"count": told})
            else:
                found.pop((number, policy), None)
    for number, policy in found:
        seen.same(f"samples of group {number} of {policy}", {}, None)


def _sample_states(group: GroupStory, policy: str, each: PolicyStory) -> dict[str, int] | None:
    """None: an older program's events do not tell."""
    stored = [episode.samples for episode in group.episodes]
    if None in stored or (each.state == "trained" and each.masked is None):
        return None
    total = sum(samples.get(policy, 0) for samples in stored if samples is not None)
    if each.state == "trained":
        masked = each.masked or 0
        counts = {"trained": total - masked, "masked": masked}
    else:
        counts = {each.state if each.state in ("dropped", "stale") else "held": total}
    return {state: count for state, count in counts.items() if count}


def _bytes(db: sqlite3.Connection, story: Retelling, seen: Comparison, payloads: Path | None) -> None:
    """An episode that is done has its bytes, unless its group is pruned; then none of the group has."""
    pruned = {group: {"episodes": episodes, "bytes": size} for group, (episodes, size) in story.pruned.items()}
    _compare(seen, "pruned group", _table(db, 1, "SELECT group_id, episodes, bytes FROM pruned_groups"), pruned)
    stored = _table(db, 2, "SELECT group_id, idx, file, body IS NULL AS empty FROM payloads")
    for number, group in story.groups.items():
        for idx, each in enumerate(group.episodes):
            row = stored.pop((number, idx), None)
            what = f"bytes of episode {number}/{idx}"
            if number in story.pruned:
                seen.same(what, row, None)
            elif row is None:
                seen.same(what, None, {} if each.state == "done" else None)
            elif each.state not in ("done", "given_up"):
                seen.same(what, row, None)
            else:
                _is_there(seen, what, row, payloads)
    for number, idx in stored:
        seen.same(f"bytes of episode {number}/{idx}", {}, None)


def _frozen(db: sqlite3.Connection, seen: Comparison, payloads: Path | None) -> None:
    """The rows of a batch that is not pruned are in their table or in a file, and of no other batch."""
    stored = {row[0] for row in db.execute("SELECT batch FROM batch_rows")}
    for number, size, file in db.execute("SELECT id, rows, file FROM batches ORDER BY id").fetchall():
        what = f"rows of batch {number}"
        seen.same(what, {} if number in stored else None, None if size is None else {})
        stored.discard(number)
        if file is not None and payloads is not None and not (payloads / file).exists():
            seen.differences.append(f"{what}: file {file} is missing")
    for number in sorted(stored):
        seen.same(f"rows of batch {number}", {}, None)


def _counters(db: sqlite3.Connection, tally: Tally, seen: Comparison) -> list[str]:
    found = {name: value for name, value in db.execute("SELECT name, value FROM counters") if name not in NOT_TOLD}
    for name in sorted(found.keys() | tally.counters.keys()):
        seen.same(f"counter {name}", {"value": found.get(name, 0)}, {"value": tally.counters[name]})
    silent = [name for (name,) in db.execute("SELECT name FROM counters ORDER BY name") if name in NOT_TOLD]
    return [f"counter {name}: what it counts changes nothing and leaves no event" for name in silent]


def _in_a_row(db: sqlite3.Connection, tally: Tally, seen: Comparison) -> list[str]:
    unknown = []
    for policy, no_signal, barren in db.execute("SELECT name, no_signal, barren FROM policies ORDER BY name"):
        for what, found, told in (
            ("no_signal", no_signal, tally.no_signal.get(policy)),
            ("barren", barren, tally.barren.get(policy)),
        ):
            if told is None:
                unknown.append(f"policy {policy}: {what}, which begins anew while the policy is starved")
            else:
                seen.same(f"policy {policy}", {what: found}, {what: told})
    return unknown


def _algorithms(db: sqlite3.Connection, tally: Tally, seen: Comparison) -> list[str]:
    """That the row is what was written with the last decision; not what that should have been."""
    row = db.execute("SELECT state FROM algorithms WHERE name = 'pipeline'").fetchone()
    if tally.algorithms is None:
        return [] if row is None else ["state of the algorithms: the events are of a program that did not tell it"]
    found = None if row is None else {"digest": state_digest(row[0])}
    seen.same("state of the algorithms", found, {"digest": tally.algorithms})
    return []


def _is_there(seen: Comparison, what: str, row: dict[str, Any], payloads: Path | None) -> None:
    seen.rows += 1
    if (row["file"] is None) == bool(row["empty"]):
        seen.differences.append(f"{what}: must be in the row or in a file")
    elif row["file"] is not None and payloads is not None and not (payloads / row["file"]).exists():
        seen.differences.append(f"{what}: file {row['file']} is missing")
