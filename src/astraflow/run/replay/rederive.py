"""What the algorithms know, made again: the recipe's own algorithms decide the recorded past once more, and what they
know at its end is compared with what the run has stored.

    events ─► Rerun, pipeline in its first state ─► every decision the recorded one? ─► the same state to the bit?
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from astraflow.dataflow.ledger import StoredState
from astraflow.dataflow.settings import RunSpec
from astraflow.errors import ConfigError
from astraflow.run.config import load_config
from astraflow.run.layout import RunFolder
from astraflow.run.replay.figures import compared
from astraflow.run.replay.record import Record, read_record
from astraflow.run.replay.rerun import Rerun
from astraflow.run.run_db import open_run_db
from astraflow.run.spec import run_spec
from astraflow.wire.codec import decode, encode

WHAT = "state of the algorithms"
RECAST = {"cast": "was given a role", "frozen": "was frozen", "unfrozen": "was trained again"}
"""Events of an operator after which other policies play, which the recipe does not tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rederived:
    decisions: int = 0
    """Made again: tasks that were chosen, verdicts, batches."""
    differences: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()
    """Why nothing can be said, in words."""


def rederive(run: RunFolder) -> Rederived:
    """Of a run whose tables are what its events tell. What cannot be repeated is not compared, with the cause."""
    try:
        resolved = load_config(run.path)
        with open_run_db(run.database) as db:
            record = read_record(db, run.payloads)
            require_repeatable(record)
            row = db.connection.execute("SELECT state FROM algorithms WHERE name = 'pipeline'").fetchone()
            if row is None:
                raise ConfigError("the run has not stored any")
            return rederived(run_spec(resolved, run.path.name), record, row[0])
    except ConfigError as error:
        return Rederived(not_compared=(f"{WHAT}, made again from the decisions: {error}",))


def rederived(spec: RunSpec, record: Record, stored: bytes) -> Rederived:
    """``spec.pipeline`` must be in its first state; ``stored``: the row that dataflow has written."""
    again = Rerun(spec, record).run()
    found = compared(again)
    decisions = found.admissions + found.verdicts + found.batches
    made = decode(encode(StoredState(state=spec.pipeline.state_dict())), StoredState).state
    differences = (*found.differences, *_differences(decode(stored, StoredState).state, made))
    if differences and record.rebuilt:
        why = (
            f"{WHAT}, made again from the decisions: the bytes of {len(record.rebuilt)} groups are pruned, and with "
            f"their episodes' scores alone it is another one ({differences[0]})"
        )
        return Rederived(not_compared=(why,))
    return Rederived(decisions=decisions, differences=differences)


def require_repeatable(record: Record) -> None:
    """Raises ConfigError for a past that the recipe does not tell."""
    for event in record.events():
        if event.kind == "tasks_changed":
            raise ConfigError(
                "this run went on with other tasks (resume --allow-changed-tasks): what it chose before that cannot be "
                "asked again"
            )
        if event.kind in RECAST:
            raise ConfigError(
                f"policy {event.policy} {RECAST[event.kind]} while this run went on: what came of that is not in its "
                "recipe, so it cannot be asked again"
            )
    if not record.groups:
        raise ConfigError("this run has not opened a training group yet: there is nothing to replay")


def _differences(stored: dict[str, Any], made: dict[str, Any]) -> Iterator[str]:
    """One for each place at which they differ."""
    found, wanted = dict(_leaves("", stored)), dict(_leaves("", made))
    for path in sorted(found.keys() | wanted.keys()):
        if _bits(found.get(path)) != _bits(wanted.get(path)):
            yield f"{WHAT}: {path} is {_shown(found, path)}, the decisions make it {_shown(wanted, path)}"


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list) and value:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for name, each in pairs:
            yield from _leaves(f"{path}.{name}" if path else str(name), each)
    else:
        yield path, value


def _bits(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    return (type(value), value)


def _shown(leaves: dict[str, Any], path: str) -> str:
    if path not in leaves:
        return "absent"
    value = leaves[path]
    shown = f"{value.dtype}{list(value.shape)} {value.ravel()[:4]}" if isinstance(value, np.ndarray) else repr(value)
    return shown[:80]
