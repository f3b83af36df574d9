"""Every wait has a name from here, so that status can say who waits for what, and metrics for how long."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from enum import StrEnum


class Wait(StrEnum):
    """What a component waits for."""

    LEASE = "lease"
    """a rollout service, for dataflow to have an episode for it"""
    SLOT = "slot"
    """a rollout service, for an engine slot"""
    WEIGHTS = "weights"
    """a rollout service, for a version's bytes"""
    ENGINE = "engine"
    """an episode, for a reply of the engine"""
    GRADER = "grader"
    """an episode, for its reward"""
    BATCH = "batch"
    """a trainer, for a batch"""
    VERSION = "version"
    """a moving average, for the next version of what it averages"""
    COMMIT = "commit"
    """a trainer, for dataflow to acknowledge a step"""
    PUBLISH = "publish"
    """a trainer, for the store to take its weights"""
    STORAGE = "storage"
    """anyone, for space on a disk that is full"""
    DATAFLOW = "dataflow"
    """anyone, for dataflow to answer at all"""


QUARANTINED = "quarantined"
"""What a worker does that may not serve: ``ComponentReport.doing``, with ``why`` (or ``error``) as the reason."""

Waiting = Callable[[Wait], AbstractContextManager[None]]
"""Told of a wait: it lasts as long as the context."""

WAITING: ContextVar[Waiting] = ContextVar("WAITING", default=lambda _: nullcontext())
"""Who is told of waits inside user code; the player of an episode sets it for the episode's task."""


class WaitReason(StrEnum):
    """Why dataflow has nothing to hand out now."""

    NO_ROOM = "no_room"
    """enough groups are alive for the staleness bound (back-pressure)"""
    NO_TASK = "no_task"
    """Curate has no task now"""
    NO_CAPABLE = "no_capable"
    """pending episodes need a policy that this worker does not serve"""
    TOO_SLOW = "too_slow"
    """a faster worker finishes what is pending before it is stale, this one would not"""
    TOO_OLD = "too_old"
    """its weights are older than the staleness bound allows"""
    NO_READY = "no_ready"
    """too few kept groups for a batch"""
    EVAL_FIRST = "eval_first"
    """only evaluation episodes are pending and this worker's share of them is used"""
    STORAGE_FULL = "storage_full"
    FINISHED = "finished"
