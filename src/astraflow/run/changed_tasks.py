"""Go on with other tasks than the run was started with, because the user said so (``--allow-changed-tasks``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astraflow.algorithms.base import State
from astraflow.dataflow.ledger import StoredState
from astraflow.dataflow.store import Store, connect, lock_run
from astraflow.run.config import Resolved, read_config
from astraflow.run.layout import RunFolder, write_json
from astraflow.run.task_record import changed_digests, record_tasks
from astraflow.wire.codec import decode, encode


def accept_changed_tasks(run: RunFolder, now: Resolved) -> None:
    """From here on these are the run's tasks, begun from their first epoch. Conflict while a dataflow serves the run.

    Nothing that was trained or evaluated changes. The database first, config.json last: broken off in between, it is
    done again by the next attempt.
    """
    stored = read_config(run.path)
    digests = changed_digests(stored["config"], now.config)
    with lock_run(run.path):
        if run.database.exists():
            _accept_in_ledger(run, digests)
        write_json(run.tasks, record_tasks(now.recipe))
        before = [*stored.get("before", []), stored["digest"]]
        write_json(run.config, {**now.as_file(), "before": before})


def _accept_in_ledger(run: RunFolder, digests: Mapping[str, str]) -> None:
    store = Store(connect(run.database))
    try:
        with store.transaction():
            row = store.one("SELECT state FROM algorithms WHERE name = 'pipeline'")
            if row is None:
                return
            state = _from_the_first_epoch(decode(row[0], StoredState).state, digests)
            store.run("UPDATE algorithms SET state = ? WHERE name = 'pipeline'", (encode(StoredState(state=state)),))
            store.event(float(store.get("now")), "tasks_changed", digests=dict(digests))
    finally:
        store.connection.close()


def _from_the_first_epoch(state: Any, digests: Mapping[str, str]) -> Any:
    """Every position in tasks that have changed, wherever it is in the algorithms' states, begins anew.

    So does what was learnt of them: it goes by their places, which may be other tasks' now.
    """
    if isinstance(state, Mapping):
        if state.get("tasks") in digests and "position" in state:
            learned: State = {"learned": {}} if "learned" in state else {}
            return {**state, **learned, "tasks": digests[state["tasks"]], "position": 0}
        return {key: _from_the_first_epoch(value, digests) for key, value in state.items()}
    return [_from_the_first_epoch(each, digests) for each in state] if isinstance(state, list | tuple) else state
