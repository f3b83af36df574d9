"""What goes over the wire of the rollout workers together; part of ``messages``, under the same rules."""

from __future__ import annotations

from astraflow.types import Record


class PoolWorker(Record, frozen=True, kw_only=True):
    """One rollout service, in the last minute."""

    name: str
    state: str
    """As in ``ComponentStatus``."""
    region: str = ""
    relay: str = ""
    """URL of its data port; empty: it has none."""
    heard_s: float = 0.0
    versions: dict[str, int] = {}
    lag: dict[str, int] = {}
    """Versions that its weights are behind, by policy."""
    tokens_per_s: float | None = None
    """None: not measured yet."""
    episodes_per_s: float | None = None
    held: int = 0
    """Leases held."""
    staleness: dict[str, int] = {}
    """Of what it sent, trained samples by age at use."""
    reason: str = ""
    """Why it serves nothing; empty: it serves."""
    metrics: dict[str, float] = {}
    """Its counters of weights and relays."""
    stale: str = ""
    """By how much its weights are older than the staleness bound; empty: they are not."""


class PoolTarget(Record, frozen=True, kw_only=True):
    """How many workers there should be, and what that is concluded from (``dataflow/autoscale.py``)."""

    workers: int
    """That serve now."""
    target: int
    action: str
    """``grow``, ``shrink`` or ``hold``"""
    reason: str
    wait: float | None = None
    """Share of its time that the hungriest trainer waited for a batch; None: not measured yet."""
    consumed_per_s: float = 0.0
    produced_per_s: float = 0.0
    """Episodes that the workers could bring."""
    span_s: float = 0.0
    """How long this was measured."""


class PoolReply(Record, frozen=True, kw_only=True):
    run: str
    state: str
    """As in ``StatusReply``."""
    workers: tuple[PoolWorker, ...]
    target: PoolTarget
