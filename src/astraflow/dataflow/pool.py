"""The rollout workers of a run: what each does, sends and lacks, and how many there should be. Reads only."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping

from astraflow.dataflow.autoscale import Measured, decide
from astraflow.dataflow.components import ROLLOUT, TRAINER, ComponentRow
from astraflow.dataflow.ledger import Ledger
from astraflow.dataflow.meter import RATE_S, Key, Meter, Reading
from astraflow.observe.waits import QUARANTINED, Wait, WaitReason
from astraflow.wire import messages as m

LEAST_ACTIVE = 0.02
"""Share of time below which a worker's rate says nothing about what it could do."""
UNWANTED = ("surplus", "rolled_back", "not_played")
"""Reasons of dropped groups that nobody needed."""
_BLOCKED = (Wait.STORAGE.value, Wait.DATAFLOW.value)


class Pool:
    """``look`` with every tick of the service."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._meter = Meter(ledger.spec.scaling.window_s)

    def look(self, now: float) -> None:
        """Read the counters, now and then."""
        if not self._meter.due(now):
            return
        alive = [row for row in self._ledger.components.all() if row.state == "alive"]
        event = self._ledger.store.number("SELECT MAX(id) FROM events")
        self._meter.read(now, alive, self._serving(alive, self._held()), event)

    def reply(self, now: float) -> m.PoolReply:
        rows = [row for row in self._ledger.components.all() if row.component == ROLLOUT]
        held = self._held()
        window = self._meter.window(RATE_S)
        done = Counter(self._done(window, lane=None))
        ages = self._ages(window)
        return m.PoolReply(
            run=self._ledger.spec.run,
            state=self._ledger.state,
            workers=tuple(self._worker(now, row, held[row.name], window, done, ages) for row in rows),
            target=self._target(self._serving(rows, held)),
        )

    def _held(self) -> Counter[str]:
        """Worker → leases."""
        return Counter(
            dict(self._ledger.store.all("SELECT worker, COUNT(*) FROM episodes WHERE state = 'leased' GROUP BY worker"))
        )

    # ── one worker ──

    def _worker(
        self,
        now: float,
        row: ComponentRow,
        held: int,
        window: tuple[Reading, Reading] | None,
        done: Counter[str],
        ages: dict[str, Counter[int]],
    ) -> m.PoolWorker:
        span = window[1].at - window[0].at if window is not None else 0.0
        key: Key = (row.name, row.incarnation)
        return m.PoolWorker(
            name=row.name,
            state=row.state,
            region=row.report.region,
            relay=row.report.relay,
            heard_s=max(0.0, now - row.heard_at),
            versions=row.report.versions,
            lag=self._lags(row),
            tokens_per_s=self._meter.tokens_per_s(key) if row.state == "alive" else None,
            episodes_per_s=done[row.name] / span if span else None,
            held=held,
            staleness={str(age): count for age, count in sorted(ages.get(row.name, Counter()).items())},
            reason=self._reason(row, held),
            stale=self._stale(row),
            metrics={
                name: value for name, value in row.report.metrics.items() if name.startswith(("weights", "relay"))
            },
        )

    def _lags(self, row: ComponentRow) -> dict[str, int]:
        """Versions that each policy is ahead of what the worker holds."""
        newest = self._ledger.policies.versions
        return {
            policy: max(0, newest[policy] - version)
            for policy, version in row.report.versions.items()
            if policy in newest
        }

    def _serving(self, rows: Iterable[ComponentRow], held: Mapping[str, int]) -> frozenset[Key]:
        return frozenset(
            (row.name, row.incarnation)
            for row in rows
            if row.component == ROLLOUT and row.policies and not self._reason(row, held.get(row.name, 0))
        )

    def _reason(self, row: ComponentRow, held: int) -> str:
        """Why it serves nothing now; empty: it does, or could."""
        report = row.report
        if row.state != "alive":
            return row.state + (f": {report.error}" if report.error else "")
        if report.error:
            return report.error
        if self._ledger.components.drains(row.name):
            return "it was told to leave"
        if report.doing == QUARANTINED:
            return QUARANTINED + (f": {report.why}" if report.why else "")
        # Who plays, and waits for another version for one lease more, serves: else each such lease were a change.
        if report.doing in _BLOCKED or (report.doing == Wait.WEIGHTS.value and not held):
            return f"waits for {report.doing}" + (f": {report.why}" if report.why else "")
        missing = sorted(set(row.policies) - set(report.versions))
        if missing or report.doing == "starting":
            return f"holds no version of {', '.join(missing)} yet" if missing else "starting"
        lacks = sorted(self._ledger.needed_policies() - set(row.policies))
        if row.policies and lacks:
            return f"{WaitReason.NO_CAPABLE.value}: it does not serve {', '.join(lacks)}"
        return ""

    def _stale(self, row: ComponentRow) -> str:
        """No reason: a worker near the bound is beyond it for a moment, now and then, and gets leases all the time."""
        for policy, lag in self._lags(row).items():
            bound = self._ledger.policies.specs[policy].max_staleness
            if self._ledger.policies.specs[policy].trainable and lag > bound:
                return f"its weights of {policy} are {lag} versions old, what they sample is stale (bound {bound})"
        return ""

    # ── what was sent ──

    def _done(self, window: tuple[Reading, Reading] | None, *, lane: int | None) -> list[str]:
        """The worker of each episode that was stored in the window."""
        if window is None:
            return []
        rows = self._ledger.store.all(
            "SELECT v.data FROM events v JOIN episodes e ON e.group_id = v.group_id AND e.idx = v.idx "
            "WHERE v.id > ? AND v.id <= ? AND v.kind = 'done' AND (? IS NULL OR e.lane = ?)",
            window[0].event,
            window[1].event,
            lane,
            lane,
        )
        return [str(json.loads(data).get("worker", "")) for (data,) in rows]

    def _committed(self, window: tuple[Reading, Reading]) -> list[int]:
        rows = self._ledger.store.all(
            "SELECT batch FROM events WHERE id > ? AND id <= ? AND kind = 'committed'", window[0].event, window[1].event
        )
        return [int(batch) for (batch,) in rows]

    def _consumed(self, window: tuple[Reading, Reading]) -> dict[str, int]:
        """Episodes that were used up in the window, by policy: trained, or judged and not kept. What was not wanted
        (surplus, stale) is none of them."""
        found: Counter[str] = Counter()
        for policy, data, size in self._ledger.store.all(
            "SELECT v.policy, v.data, g.size FROM events v JOIN groups g ON g.id = v.group_id "
            "WHERE v.id > ? AND v.id <= ? AND v.kind = 'dropped'",
            window[0].event,
            window[1].event,
        ):
            found[policy] += 0 if json.loads(data).get("reason") in UNWANTED else size
        for batch in self._committed(window):
            for policy, size in self._ledger.store.all(
                "SELECT b.policy, g.size FROM batches b JOIN batch_groups bg ON bg.batch = b.id "
                "JOIN groups g ON g.id = bg.group_id WHERE b.id = ? AND bg.use = 0",
                batch,
            ):
                found[policy] += size
        return dict(found)

    def _ages(self, window: tuple[Reading, Reading] | None) -> dict[str, Counter[int]]:
        """Worker → age at use → trained samples, of the batches that were committed in the window."""
        found: dict[str, Counter[int]] = {}
        for batch in self._committed(window) if window is not None else ():
            for worker, age, count in self._ledger.store.all(
                "SELECT e.worker, s.age, COUNT(*) FROM batches b JOIN batch_groups bg ON bg.batch = b.id "
                "JOIN samples s ON s.group_id = bg.group_id AND s.policy = b.policy "
                "JOIN episodes e ON e.group_id = s.group_id AND e.idx = s.idx "
                "WHERE b.id = ? AND s.state = 'trained' AND s.age IS NOT NULL GROUP BY e.worker, s.age",
                batch,
            ):
                found.setdefault(worker or "", Counter())[age] += count
        return found

    # ── how many ──

    def _target(self, serving: frozenset[Key]) -> m.PoolTarget:
        measured = self._measured(serving)
        decision = decide(self._ledger.spec.scaling, measured)
        return m.PoolTarget(
            workers=measured.workers,
            target=decision.workers,
            action=decision.action,
            reason=decision.reason,
            wait=measured.wait,
            consumed_per_s=measured.consumed,
            produced_per_s=measured.produced,
            span_s=measured.span_s,
        )

    def _measured(self, serving: frozenset[Key]) -> Measured:
        workers = len(serving)
        window = self._meter.window() if self._meter.is_of(serving) else None
        trains = any(row.component == TRAINER and row.state == "alive" for row in self._ledger.components.all())
        if window is None:
            return Measured(workers=workers, trains=trains)
        span = window[1].at - window[0].at
        active = self._meter.active()
        brought = len(self._done(window, lane=0)) / span
        return Measured(
            workers=workers,
            span_s=span,
            wait=self._meter.wait(),
            trains=trains,
            consumed=max(self._consumed(window).values(), default=0) / span,
            produced=brought / max(active, LEAST_ACTIVE) if active is not None else brought,
        )
