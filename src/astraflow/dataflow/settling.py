"""A ready group gets its verdicts: asked of the algorithms, then written together with their changed state.

It runs in the transaction of the last episode and in a savepoint of its own: an algorithm that raises stops the run
and loses no data.
"""

from __future__ import annotations

from functools import partial

from astraflow.dataflow.groups import ReadyRow
from astraflow.dataflow.ledger import Ledger
from astraflow.dataflow.settle import asked, settle
from astraflow.dataflow.starving import starve_if_barren


def settle_ready(ledger: Ledger, now: float) -> int:
    """Settle every ready group in the order of closing; returns how many. Raises RunFailed with the group's id."""
    ready = ledger.groups.ready()
    if not ready:
        return 0
    for row in ready:
        _settle_one(ledger, now, row)
    for policy in ledger.policies.trainable:
        ledger.groups.sweep(now, policy)
        ledger.groups.drop_surplus(now, policy)
        starve_if_barren(ledger, now, policy)
    ledger.save_algorithms(now)
    return len(ready)


def _settle_one(ledger: Ledger, now: float, row: ReadyRow) -> None:
    spec = ledger.spec
    verdicts = settle(
        spec.pipeline,
        group=row.group,
        task=row.task,
        size=row.size,
        episodes=ledger.payloads.episodes(row.group, row.size),
        arrival=row.arrival,
        policies=dict.fromkeys(ledger.groups.policies_of(row.group), True),
        min_group=spec.limits.counted_members(row.size),
        versions=ledger.policies.versions,
    )
    curate = spec.pipeline.curate
    for policy, verdict in verdicts.items():
        where = f"{type(curate).__name__}.observe on group {row.group}, policy {policy}"
        asked(where, partial(curate.observe, verdict.summary))
    ledger.groups.settle(now, row.group, verdicts)
