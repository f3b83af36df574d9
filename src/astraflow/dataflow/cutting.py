"""The next batch of a policy: the frozen one if there is one, else one cut from what Select picks."""

from __future__ import annotations

from functools import partial

from astraflow.algorithms.base import Replay, StepPace
from astraflow.dataflow.cut import build_rows
from astraflow.dataflow.ledger import Ledger, Unchosen
from astraflow.dataflow.settle import asked
from astraflow.dataflow.starving import CHOSE_NONE, fed, smaller_batch, waits_words
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
    held = batch is None and not _may_step(ledger, policy)
    ledger.unchosen.pop(policy, None)
    if batch is None and not held:
        batch = _cut(ledger, now, policy)
    if batch is None:
        why = waits_words(ledger, now, policy)
        held_by = f"{type(ledger.spec.pipeline.pace).__name__} holds it back for the other policies; " if held else ""
        return m.BatchReply(reason=WaitReason.NO_READY, why=held_by + why)
    return m.BatchReply(batch=ledger.batches.issue(now, batch, request.trainer_epoch))


def _may_step(ledger: Ledger, policy: str) -> bool:
    """What Pace says, if it paces steps at all; who is starved may take what there is."""
    pace = ledger.spec.pipeline.pace
    if not isinstance(pace, StepPace) or smaller_batch(ledger, policy):
        return True
    return asked(f"{type(pace).__name__}.may_step", partial(pace.may_step, policy, ledger.groups.rooms()))


def _cut(ledger: Ledger, now: float, policy: str) -> int | None:
    """Ends: every round but the last makes at least one kept group stale."""
    spec = ledger.policies.specs[policy]
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
        ledger.save_algorithms(now)
        if batch is not None:
            fed(ledger, policy)
            return batch


def _pick(ledger: Ledger, now: float, policy: str) -> list[tuple[int, int]]:
    """(group, use) of whole groups, each once, exactly as many as a batch needs; of a starved policy that may, as many
    as are kept. Raises RunFailed for any other answer.
    """
    need = ledger.policies.specs[policy].groups_per_batch
    select = ledger.spec.pipeline.select
    ledger.groups.sweep(now, policy)
    ready = ledger.groups.kept(policy)
    oldest = ledger.groups.oldest_open(policy)
    if smaller_batch(ledger, policy):
        # Nothing more will come: an open group must not hold back what is there.
        need, oldest = min(need, len(ready)), None
    uses = {group.group: 0 for group in ready}
    if isinstance(select, Replay):
        stored = ledger.groups.stored(policy)
        uses |= {group.group: group.uses for group in stored}
        what = f"{type(select).__name__}.pick_with for policy {policy}"
        pick = partial(select.pick_with, ready, stored, policy=policy, need=need, oldest_open=oldest)
        fresh, again = asked(what, pick)
    else:
        what = f"{type(select).__name__}.pick for policy {policy}"
        fresh, again = asked(what, partial(select.pick, ready, need=need, oldest_open=oldest)), []
    picked = [*fresh, *again]
    if not picked:
        _note_unchosen(ledger, policy, what, need=need, ready=len(ready), oldest=oldest)
    known = all(uses.get(group) == 0 for group in fresh) and all(uses.get(group, 0) > 0 for group in again)
    if picked and (len(picked) != need or len(set(picked)) != need or not known):
        raise RunFailed(f"{what} must answer {need} of the {len(uses)} ready groups or none, found {picked}")
    return [(group, uses[group]) for group in picked]


def _note_unchosen(ledger: Ledger, policy: str, what: str, *, need: int, ready: int, oldest: int | None) -> None:
    """Select had enough to choose from: that there is no batch is its own answer."""
    replays = isinstance(ledger.spec.pipeline.select, Replay)
    again = ledger.groups.rooms()[policy].replayed_groups if replays else 0
    if ready and ready >= need - again:
        asked_of = what.partition(" for policy ")[0]
        words = f"{asked_of} {CHOSE_NONE} {ready} kept groups"
        ledger.unchosen[policy] = Unchosen(words=words, waits=oldest is not None)
