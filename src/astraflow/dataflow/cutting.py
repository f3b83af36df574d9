"""The next batch of a policy: the frozen one if there is one, else one cut from what Select picks."""

from __future__ import annotations

from functools import partial

from astraflow.dataflow.cut import build_rows
from astraflow.dataflow.diagnosis import lacks
from astraflow.dataflow.ledger import Ledger
from astraflow.dataflow.settle import asked
from astraflow.dataflow.starving import fed, smaller_batch, starved_words
from astraflow.errors import RunFailed
from astraflow.observe.waits import WaitReason
from astraflow.wire import messages as m


def try_batch(ledger: Ledger, now: float, request: m.BatchRequest, *, heard: bool = True) -> m.BatchReply:
    """``heard``: the trainer has called just now. Raises Fenced, and the first cause of a run that failed."""
    policy = request.policy
    ledger.policies.require_epoch(policy, request.trainer_epoch)
    if heard:
        ledger.trainer_said(now, policy, request.report)
    ledger.raise_if_failed()
    if ledger.trained_out(policy):
        return m.BatchReply(finished=True, reason=WaitReason.FINISHED)
    batch = ledger.batches.head(policy)
    if batch is None:
        batch = _cut(ledger, now, policy)
    if batch is None:
        return m.BatchReply(reason=WaitReason.NO_READY, why=starved_words(ledger, policy) or lacks(ledger, now, policy))
    return m.BatchReply(batch=ledger.batches.issue(now, batch, request.trainer_epoch))


def _cut(ledger: Ledger, now: float, policy: str) -> int | None:
    """Ends: every round but the last makes at least one kept group stale."""
    spec = ledger.spec.policies[policy]
    while True:
        picked = _pick(ledger, now, policy)
        if not picked:
            return None
        groups = ledger.cut_groups(policy, picked)
        cut = build_rows(
            groups,
            pipeline=ledger.spec.pipeline,
            policy=policy,
            version=ledger.policies.versions[policy],
            max_staleness=spec.max_staleness,
        )
        batch = ledger.freeze(now, policy, groups, cut)
        if batch is not None:
            fed(ledger, policy)
            ledger.save_algorithms()
            return batch


def _pick(ledger: Ledger, now: float, policy: str) -> list[int]:
    """Whole groups, each once, exactly as many as a batch needs; of a starved policy that may, all that are kept.

    Raises RunFailed for any other answer.
    """
    need = ledger.spec.policies[policy].groups_per_batch
    select = ledger.spec.pipeline.select
    ledger.groups.sweep(now, policy)
    ready = ledger.groups.kept(policy)
    oldest = ledger.groups.oldest_open(policy)
    if smaller_batch(ledger, policy):
        # Nothing more will come: an open group must not hold back what is there.
        need, oldest = min(need, len(ready)), None
    what = f"{type(select).__name__}.pick for policy {policy}"
    picked = asked(what, partial(select.pick, ready, need=need, oldest_open=oldest))
    known = {group.group for group in ready}
    if picked and (len(picked) != need or len(set(picked)) != need or not known.issuperset(picked)):
        raise RunFailed(f"{what} must answer {need} of the {len(known)} ready groups or none, found {picked}")
    return picked
