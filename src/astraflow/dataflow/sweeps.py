"""The passing of time: dead components, expired leases, time limits, and work that came to be worth nothing."""

from __future__ import annotations

from astraflow.dataflow.components import ROLLOUT
from astraflow.dataflow.ledger import Ledger
from astraflow.dataflow.settings import Limits
from astraflow.types import FailureKind

LATELY = 32
"""Groups that closed last: what they took is expected of those that are open."""
SWEPT = "swept_at"
"""Where the ledger keeps when it was last swept: an undone transaction takes that back too."""
HEARD_AGAIN = "heard_again_at"
"""The same of the end of the last gap: whatever is counted in seconds of the others' silence begins anew there."""


def sweep(ledger: Ledger, now: float, *, gone: str | None = None) -> bool:
    """Sweep dead components, expired leases and time limits; True if an episode became pending or a group ready.

    ``gone``: a rollout service that is no more, whose leases end at once.
    """
    _hear_again(ledger, now)
    if gone is not None:
        ledger.episodes.expire_worker(gone)
    for component, name in ledger.components.bury(now):
        if component == ROLLOUT:
            ledger.episodes.expire_worker(name)
    changed = False
    for group, idx, worker, over in ledger.episodes.expired(now):
        kind = FailureKind.TIMEOUT if over else FailureKind.INFRA
        why = f"over its time limit on {worker}" if over else f"lease expired on {worker}"
        ledger.episodes.fail(now, group, idx, kind, why, worker=worker)
        changed = True
    if ledger.evals.close_ready(now):
        ledger.finish_if_done(now)
    return changed


def deaf_after_s(limits: Limits) -> float:
    """A longer gap between two sweeps is dataflow's own silence. A shorter one leaves whoever speaks time to be heard:
    a heartbeat is at most half of any term."""
    return min(limits.lease_ttl_s, limits.dead_after_s) / 2


def _hear_again(ledger: Ledger, now: float) -> None:
    """After a gap (this process was stopped, its machine slept, its disk was full) the silence of the others says
    nothing, as after a restart: all get a full new term. Whoever is really dead is found at the end of that."""
    silent_s = now - max(float(ledger.store.get(SWEPT) or 0.0), ledger.started_at)
    if silent_s > deaf_after_s(ledger.spec.limits):
        ledger.episodes.new_terms(now)
        ledger.components.new_terms(now)
        ledger.store.set(HEARD_AGAIN, now)
        ledger.store.event(now, "heard_again", silent_s=silent_s)
    ledger.store.set(SWEPT, now)


def goodbye(ledger: Ledger, now: float, component: str, name: str) -> bool:
    """It ends on purpose: nobody need wait until it is declared dead. True as after a sweep."""
    ledger.components.left(now, component, name)
    return sweep(ledger, now, gone=name if component == ROLLOUT else None)


def cancel_hopeless(ledger: Ledger, now: float) -> int:
    """Optimisation: end open groups of which nothing could be trained any more, whatever comes of them.

    All their episodes were begun by versions that are now too old for every trainable policy, also where a policy
    speaks as long after the beginning as it did of late. The guarantee is the sweep at the cut; this only saves the
    work.
    """
    bounds = {
        policy: ledger.policies.versions[policy] - ledger.policies.specs[policy].max_staleness
        for policy in ledger.policies.trainable
    }
    if all(bound <= 0 for bound in bounds.values()):
        return 0
    old: dict[int, dict[str, int]] = {}
    for (group,) in ledger.store.all(
        "SELECT id FROM groups g WHERE state = 'open' AND purpose = 'train' AND supervised = 0 AND NOT EXISTS "
        "(SELECT 1 FROM episodes e WHERE e.group_id = g.id AND e.state = 'pending')"
    ):
        begun = ledger.store.all(
            "SELECT j.key, MAX(j.value) FROM episodes e, json_each(e.leased_versions) j "
            "WHERE e.group_id = ? AND e.state <> 'given_up' GROUP BY j.key",
            group,
        )
        if begun and _all_older(dict(begun), bounds):
            old[group] = dict(begun)
    if not old:
        return 0
    bounds = {policy: bound - _lag(ledger, policy) for policy, bound in bounds.items()}
    hopeless = [group for group, newest in old.items() if _all_older(newest, bounds)]
    for group in hopeless:
        _cancel(ledger, now, group)
    return len(hopeless)


def _all_older(newest: dict[str, int], bounds: dict[str, int]) -> bool:
    return all(newest.get(policy, bound) < bound for policy, bound in bounds.items())


def _lag(ledger: Ledger, policy: str) -> int:
    """Versions between the lease of a group and what it was sampled by, the most of those that closed last: who speaks
    after a slow tool speaks by newer weights."""
    return max(
        0,
        ledger.store.number(
            "SELECT MAX(p.fresh_version - (SELECT MAX(j.value) FROM episodes e, json_each(e.leased_versions) j "
            "WHERE e.group_id = p.group_id AND j.key = p.policy)) FROM (SELECT group_id, policy, fresh_version "
            "FROM group_policy WHERE policy = ? AND fresh_version IS NOT NULL ORDER BY group_id DESC LIMIT ?) p",
            policy,
            LATELY,
        ),
    )


def _cancel(ledger: Ledger, now: float, group: int) -> None:
    for policy in ledger.groups.policies_of(group):
        ledger.groups.make_stale(now, group, policy)
    unfinished = ledger.store.all("SELECT idx FROM episodes WHERE group_id = ? AND state = 'leased'", group)
    for (idx,) in unfinished:
        ledger.store.run(
            "UPDATE episodes SET state = 'given_up', kind = ?, ended_at = ? WHERE group_id = ? AND idx = ?",
            (FailureKind.CANCELLED, now, group, idx),
        )
        ledger.store.event(now, "given_up", group=group, idx=idx, failure=FailureKind.CANCELLED)
    ledger.store.run("UPDATE groups SET state = 'closed', left_episodes = 0, ended_at = ? WHERE id = ?", (now, group))
    ledger.store.count("cancelled_groups")
