"""What the ledger says of the run, for people and metrics. Reads only."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from astraflow.dataflow.components import ComponentRow
from astraflow.dataflow.diagnosis import trainer_words
from astraflow.dataflow.ledger import Ledger
from astraflow.dataflow.starving import waits_words
from astraflow.dataflow.store import Store
from astraflow.wire import messages as m

MAX_EVENTS = 10_000


def status(ledger: Ledger, now: float, *, lags_s: Sequence[float], full_at: float | None) -> m.StatusReply:
    """``lags_s``: how late the event loop's last ticks were, newest last. ``full_at``: since when the disk is full."""
    store = ledger.store
    error = ledger.error
    counters: dict[str, float] = dict(store.all("SELECT name, value FROM counters ORDER BY name"))
    started = store.get("first_lease_at")
    return m.StatusReply(
        run=ledger.spec.run,
        state=ledger.state,
        error=f"{error[0]}: {error[1]}" if error else (None if full_at is None else "StorageFull: the disk is full"),
        now_s=now,
        policies=tuple(_policy(ledger, now, policy) for policy in ledger.policies.specs),
        components=(_dataflow(ledger, now, lags_s, full_at), *_components(ledger, now)),
        added=tuple(ledger.policies.added.values()),
        episodes=ledger.counts.episodes(),
        evals=ledger.evals.points(float(started or 0.0)),
        counters={
            **counters,
            "loop_lag_s": lags_s[-1],
            "loop_lag_max_s": max(lags_s),
            "open_evals": ledger.evals.open,
        },
    )


def _policy(ledger: Ledger, now: float, policy: str) -> m.PolicyStatus:
    trainable = policy in ledger.policies.trainable
    return m.PolicyStatus(
        policy=policy,
        trainable=trainable,
        version=ledger.policies.versions[policy] if trainable else _played(ledger, policy),
        steps=ledger.policies.steps[policy],
        groups=ledger.counts.groups(policy),
        staleness=ledger.counts.ages(policy),
        waits=_waits(ledger, now, policy) if trainable else "",
        frozen=trainable and ledger.policies.is_frozen(policy),
    )


def _waits(ledger: Ledger, now: float, policy: str) -> str:
    trainer = trainer_words(ledger, now, policy) if ledger.state == "running" else ""
    return "; ".join(filter(None, [trainer, waits_words(ledger, now, policy)]))


def _played(ledger: Ledger, policy: str) -> int:
    """Of a frozen policy the version that is played with: 0 until it is swapped."""
    newest = ledger.policies.newest.get(policy)
    return 0 if newest is None else newest.version


def _dataflow(ledger: Ledger, now: float, lags_s: Sequence[float], full_at: float | None) -> m.ComponentStatus:
    """Its own line: it waits for nobody but its disk."""
    since = ledger.started_at if ledger.state == "running" else float(ledger.store.get("ended_at") or now)
    doing = {"running": "serves", "finished": "has finished"}.get(ledger.state, "has failed")
    why = f"event loop {1000 * lags_s[-1]:.0f} ms late, at most {1000 * max(lags_s):.0f} ms"
    if full_at is not None:
        doing, why, since = "waits for space on the disk", "nothing is taken until then", full_at
    return m.ComponentStatus(
        component="dataflow",
        name=ledger.spec.run,
        state="alive",
        heard_s=0.0,
        report=m.ComponentReport(doing=doing, since_s=max(0.0, now - since), why=why),
    )


def _components(ledger: Ledger, now: float) -> tuple[m.ComponentStatus, ...]:
    held: dict[str, int] = dict(
        ledger.store.all("SELECT worker, COUNT(*) FROM episodes WHERE state = 'leased' GROUP BY worker")
    )
    return tuple(
        m.ComponentStatus(
            component=each.component,
            name=each.name,
            state=each.state,
            heard_s=max(0.0, now - each.heard_at),
            report=_report(ledger, each),
            held=held.get(each.name, 0) if each.component == "rollout" else 0,
            played=ledger.episodes.played[each.name] if each.component == "rollout" else 0,
        )
        for each in ledger.components.all()
    )


def _report(ledger: Ledger, row: ComponentRow) -> m.ComponentReport:
    """What it said before a time when nobody could be heard is no news of what it does now."""
    if row.state != "alive" or (row.component, row.name) not in ledger.components.unheard:
        return row.report
    why = "since dataflow was started or stood still"
    return msgspec.structs.replace(row.report, doing="unheard", since_s=0.0, why=why, error=None)


def events(store: Store, request: m.EventsRequest) -> m.EventsReply:
    """In the order in which they happened, after the given id."""
    limit = max(1, min(request.limit, MAX_EVENTS))
    return m.EventsReply(
        events=tuple(
            m.Event(
                id=number,
                at_s=at,
                kind=kind,
                data={
                    **{
                        key: value
                        for key, value in (("group", group), ("index", idx), ("policy", policy), ("batch", batch))
                        if value is not None
                    },
                    **(json.loads(data) if data else {}),
                },
            )
            for number, at, kind, group, idx, policy, batch, data in store.all(
                "SELECT id, at, kind, group_id, idx, policy, batch, data FROM events WHERE id > ? ORDER BY id LIMIT ?",
                request.after,
                limit,
            )
        )
    )
