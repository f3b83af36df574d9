"""A worker asks for episodes: admit what Pace allows, then give what ``assign`` chooses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from astraflow.algorithms.base import Admission
from astraflow.algorithms.checks import MOST_EPISODES, is_number
from astraflow.dataflow.assign import Paces, Work, assign, chosen
from astraflow.dataflow.episodes import Place
from astraflow.dataflow.groups import SUPERVISED
from astraflow.dataflow.ledger import Ledger
from astraflow.dataflow.settle import asked
from astraflow.errors import RunFailed
from astraflow.observe.waits import WaitReason
from astraflow.types import Task
from astraflow.wire import messages as m

TRAIN, EVAL = 0, 1
LOOK = 1024
"""Pending episodes among which one is chosen for a worker, the oldest."""
TRIES = 4
"""What is admitted for a slow worker may be too long for it; the others get that, and one more try is made."""


def try_lease(ledger: Ledger, now: float, request: m.LeaseRequest) -> m.LeaseReply:
    """As many leases as there are for this worker, at most ``count``; none with the reason."""
    can = request.capabilities
    manifests = ledger.policies.newest.copy()
    ledger.components.serves(request.worker, can.policies, supervised=can.supervised)
    if ledger.state != "running":
        return m.LeaseReply(manifests=manifests, reason=WaitReason.FINISHED, finished=True)
    if not ledger.policies.complete or ledger.components.drains(request.worker):
        return m.LeaseReply(manifests=manifests, reason=WaitReason.NO_ROOM)
    engine = ledger.needed_policies() <= set(can.policies)
    old = engine and _too_old(ledger, now, request.versions)
    ledger.speeds.read(now)
    paces = ledger.speeds.paces(request.worker) if engine else None
    evals = _pending(ledger, EVAL, engine, can.supervised, request.count)
    train = [] if old else _train(ledger, now, paces, engine, request)
    reason = WaitReason.TOO_OLD if old else WaitReason.NO_CAPABLE if paces is None else WaitReason.TOO_SLOW
    typical = Work(place=(0, 0), tokens=ledger.speeds.tokens(), left_s=ledger.speeds.horizon_s(now))
    for _ in range(TRIES if not old and (paces is None or paces.suits(typical)) else 0):
        missing = request.count - len(chosen(train, paces))
        if missing <= 0:
            break
        no_more = _admit(ledger, now, missing)
        train = _train(ledger, now, paces, engine, request)
        if no_more is not None or paces is None:
            reason = no_more or reason
            break
    held_train, held_eval = ledger.episodes.held(request.worker)
    places = assign(
        train,
        evals,
        paces=paces,
        count=request.count,
        held_train=held_train,
        held_eval=held_eval,
        eval_share=ledger.spec.limits.eval_share,
    )
    if not places:
        return m.LeaseReply(manifests=manifests, reason=reason)
    if ledger.store.get("first_lease_at") is None:
        ledger.store.set("first_lease_at", now)
    return m.LeaseReply(leases=ledger.episodes.lease(now, request.worker, places), manifests=manifests)


def _too_old(ledger: Ledger, now: float, versions: Mapping[str, int]) -> bool:
    """Whatever it plays would be stale when it is done: the version that made its weights too old has been there for
    two heartbeats. One that is only a moment behind has the new weights before it plays."""
    policies = ledger.policies
    for policy, held in versions.items():
        if policy in policies.trainable and policies.versions[policy] - held > policies.specs[policy].max_staleness:
            spoiled = held + policies.specs[policy].max_staleness + 1
            row = ledger.store.one("SELECT MAX(at) FROM publications WHERE policy = ? AND version = ?", policy, spoiled)
            if row is not None and row[0] is not None and now - row[0] >= 2 * ledger.spec.limits.heartbeat_s:
                return True
    return False


def _pending(ledger: Ledger, lane: int, engine: bool, supervised: bool, limit: int) -> list[Place]:
    """Oldest first, of both kinds of task that the worker can play."""
    found: list[Place] = []
    if engine:
        found += ledger.episodes.pending(lane=lane, supervised=False, limit=limit)
    if supervised:
        found += ledger.episodes.pending(lane=lane, supervised=True, limit=limit)
    return sorted(found)[:limit]


def _train(ledger: Ledger, now: float, paces: Paces | None, engine: bool, request: m.LeaseRequest) -> list[Work]:
    """What of the training episodes the worker can play, with what matters where workers differ in speed."""
    supervised = request.capabilities.supervised
    if paces is None:
        return [Work(place=each) for each in _pending(ledger, TRAIN, engine, supervised, request.count)]
    speeds, horizon_s = ledger.speeds, ledger.speeds.horizon_s(now)
    found = [
        Work(
            place=(each.group, each.idx),
            tokens=speeds.tokens(each.task),
            left_s=horizon_s - (now - each.begun_at),
            overdue=now - each.opened_at > min(horizon_s, ledger.spec.limits.time_limit_s),
        )
        for each in ledger.episodes.waiting(now, limit=max(LOOK, request.count))
    ]
    if supervised:
        places = ledger.episodes.pending(lane=TRAIN, supervised=True, limit=request.count)
        found += [Work(place=each) for each in places]
    return sorted(found, key=lambda work: work.place)


def _admit(ledger: Ledger, now: float, wanted: int) -> WaitReason | None:
    """Open groups until so many episodes are pending; the reason why no further one may start."""
    pipeline = ledger.spec.pipeline
    admitted = 0
    reason: WaitReason | None = None
    while admitted < wanted:
        rooms = ledger.groups.rooms()
        if not any(room.steps_left for room in rooms.values()):
            reason = WaitReason.NO_ROOM
            break
        if not asked(f"{type(pipeline.pace).__name__}.may_admit", partial(pipeline.pace.may_admit, rooms)):
            reason = WaitReason.NO_ROOM
            break
        admission = asked(f"{type(pipeline.curate).__name__}.next", pipeline.curate.next)
        ledger.exhausted = admission is None
        if admission is None:
            reason = WaitReason.NO_TASK
            break
        check_admission(admission, f"{type(pipeline.curate).__name__}.next")
        size = 1 if admission.task.workflow == SUPERVISED else admission.episodes
        ledger.groups.admit(now, task=admission.task, size=size, version_choice=admission.version_choice)
        admitted += size
    ledger.save_algorithms(now)
    return reason


def check_admission(answer: Any, what: str) -> None:
    """Raises RunFailed unless it is a task that can be played, so many times. A source that has no such task has said
    so itself when it was asked for it."""
    task = getattr(answer, "task", None)
    if not isinstance(answer, Admission) or not isinstance(task, Task):
        found = type(answer).__name__ if task is None else f"one of {type(task).__name__}"
        raise RunFailed(f"{what} must answer an Admission of a Task, or None, found {found}: there is no such task")
    if not task.key:
        raise RunFailed(f"{what} answered a task of {task.dataset!r} without a key: there is no such task")
    if isinstance(answer.episodes, bool) or not isinstance(answer.episodes, int) or answer.episodes < 1:
        raise RunFailed(f"{what} asked for {answer.episodes} episodes of task {task.key!r}; at least 1 is needed")
    if answer.episodes > MOST_EPISODES:
        raise RunFailed(f"{what} asked for {answer.episodes} episodes of task {task.key!r}, more than {MOST_EPISODES}")
    if not (is_number(answer.version_choice) and 0 <= answer.version_choice <= 1):
        raise RunFailed(f"{what} answered version_choice {answer.version_choice!r}; it must be in [0, 1]")
