"""Who is there: rollout services and trainers, when they were last heard of, and who is dead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from astraflow.dataflow.settings import Limits
from astraflow.dataflow.store import Store
from astraflow.errors import NameTaken
from astraflow.observe.waits import QUARANTINED
from astraflow.wire.codec import decode, encode
from astraflow.wire.messages import ComponentReport, RelayPlace
from astraflow.wire.names import require_place

ROLLOUT, TRAINER = "rollout", "trainer"
ENDPOINT = re.compile(r"https?://[A-Za-z0-9.\-]+:\d{1,5}|https?://\[[0-9A-Fa-f:]+\]:\d{1,5}")
"""A URL that other workers will call, with their token: scheme, host and port, nothing more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentRow:
    component: str
    name: str
    incarnation: str
    state: str
    heard_at: float
    policies: tuple[str, ...]
    report: ComponentReport


MOST_RELAYS = 32
"""Named to one worker."""


class Components:
    def __init__(self, store: Store, limits: Limits) -> None:
        self._store = store
        self._limits = limits
        self._relays: dict[str, RelayPlace] | None = None
        """By worker; a memory of the reports, None: read them again."""
        self._reports: dict[tuple[str, str], tuple[bytes, ComponentReport]] = {}
        """By component and name: the newest one that was decoded, and what it was decoded from."""
        self.unheard: set[tuple[str, str]] = set()
        """Component and name of who was alive when nobody could be heard, and has not been heard since."""
        store.on_rollback.append(self._forget)

    def heard(self, now: float, component: str, name: str, incarnation: str) -> bool:
        """It called. True if it replaces an earlier incarnation, whose leases are worthless.

        Raises NameTaken if another incarnation of this name was heard within two heartbeats; of a process that was
        killed nothing is heard, so its successor need not wait until it is declared dead.
        """
        self.unheard.discard((component, name))
        row = self._store.one(
            "SELECT incarnation, state, heard_at FROM components WHERE component = ? AND name = ?", component, name
        )
        if row is not None and row[0] == incarnation:
            if row[1] == "left":
                return False  # what it said before its last words, and came late
            self._store.run(
                "UPDATE components SET heard_at = ?, state = 'alive' WHERE component = ? AND name = ?",
                (now, component, name),
            )
            if row[1] != "alive":
                self._forget()
                self._store.event(now, "alive", component=component, name=name)
            return False
        patience = 2 * self._limits.heartbeat_s
        if row is not None and component == ROLLOUT and row[1] == "alive" and now - row[2] < patience:
            raise NameTaken(
                f"{component} {name!r} is another process, heard {now - row[2]:.1f} s ago: choose another name, "
                f"or wait until it has been silent for {patience:g} s"
            )
        self._store.run(
            "INSERT INTO components (component, name, incarnation, state, heard_at) VALUES (?, ?, ?, 'alive', ?) "
            "ON CONFLICT (component, name) DO UPDATE SET incarnation = excluded.incarnation, state = 'alive', "
            "heard_at = excluded.heard_at, drain = 0, report = NULL",
            (component, name, incarnation, now),
        )
        self._forget()
        self._store.event(now, "joined", component=component, name=name, incarnation=incarnation, again=row is not None)
        return row is not None

    def require_current(self, component: str, name: str, incarnation: str) -> None:
        """Raises NameTaken when another process has this name by now."""
        row = self._store.one("SELECT incarnation FROM components WHERE component = ? AND name = ?", component, name)
        if row is None or row[0] != incarnation:
            raise NameTaken(f"{component} {name!r} is another process by now: this one was replaced")

    def serves(self, name: str, policies: Sequence[str], *, supervised: bool) -> None:
        """What a worker can play, for the diagnosis of a starved policy."""
        self._store.run(
            "UPDATE components SET policies = ?, supervised = ? WHERE component = 'rollout' AND name = ?",
            (",".join(sorted(policies)), int(supervised), name),
        )

    def said(self, component: str, name: str, report: ComponentReport) -> None:
        require_place(report)
        self._store.run(
            "UPDATE components SET report = ? WHERE component = ? AND name = ?", (encode(report), component, name)
        )
        if component == ROLLOUT and self._relays is not None:
            known = self._relays.get(name)
            if (known is not None or report.relay) and (known is None or _place(known) != _place(report)):
                self._forget()

    def relays(self, name: str, region: str) -> tuple[RelayPlace, ...]:
        """The data ports of the others that are alive, those of this region first, oldest first."""
        if self._relays is None:
            self._relays = {
                row.name: RelayPlace(
                    worker=row.name, incarnation=row.incarnation, url=row.report.relay, region=row.report.region
                )
                for row in self.all()
                if row.component == ROLLOUT and row.state == "alive" and row.report.relay
            }
        others = [place for place in self._relays.values() if place.worker != name]
        return tuple(sorted(others, key=lambda place: place.region != region)[:MOST_RELAYS])

    def _forget(self) -> None:
        self._relays = None

    def endpoints(self, asker: str) -> dict[str, tuple[str, ...]]:
        """Policy → where workers other than ``asker`` serve it: those that are alive and may serve."""
        found: dict[str, list[str]] = {}
        for row in self.all():
            report = row.report
            serves = row.component == ROLLOUT and row.state == "alive" and report.doing != QUARANTINED
            if serves and row.name != asker and ENDPOINT.fullmatch(report.endpoint):
                for policy in report.versions:
                    found.setdefault(policy, []).append(report.endpoint)
        return {policy: tuple(urls) for policy, urls in found.items()}

    def drain(self, name: str) -> bool:
        """Ask a worker to leave; False if there is none of this name."""
        return bool(
            self._store.run(
                "UPDATE components SET drain = 1 WHERE component = 'rollout' AND name = ?", (name,)
            ).rowcount
        )

    def drains(self, name: str) -> bool:
        return bool(self._store.number("SELECT drain FROM components WHERE component = 'rollout' AND name = ?", name))

    def left(self, now: float, component: str, name: str) -> None:
        """It said so itself; again is fine."""
        done = self._store.run(
            "UPDATE components SET state = 'left' WHERE component = ? AND name = ? AND state <> 'left'",
            (component, name),
        )
        if done.rowcount:
            self._forget()
            self._store.event(now, "left", component=component, name=name)

    def bury(self, now: float) -> list[tuple[str, str]]:
        """Declare dead who was not heard of for too long: (component, name)."""
        dead: list[tuple[str, str]] = self._store.all(
            "SELECT component, name FROM components WHERE state = 'alive' AND heard_at <= ?",
            now - self._limits.dead_after_s,
        )
        for component, name in dead:
            self._store.run("UPDATE components SET state = 'dead' WHERE component = ? AND name = ?", (component, name))
            self._store.event(now, "dead", component=component, name=name)
            self._store.count(f"dead/{component}")
            self._forget()
        return dead

    def new_terms(self, now: float) -> None:
        """Nobody could be heard: after a restart of dataflow, or a long time in which it did not look."""
        self._store.run("UPDATE components SET heard_at = ? WHERE state = 'alive'", (now,))
        self.unheard.update(self._store.all("SELECT component, name FROM components WHERE state = 'alive'"))

    def all(self) -> list[ComponentRow]:
        return [
            ComponentRow(
                component=component,
                name=name,
                incarnation=incarnation,
                state=state,
                heard_at=heard_at,
                policies=tuple(policies.split(",")) if policies else (),
                report=self._decoded(component, name, report) if report else ComponentReport(),
            )
            for component, name, incarnation, state, heard_at, policies, report in self._store.all(
                "SELECT component, name, incarnation, state, heard_at, policies, report FROM components "
                "ORDER BY component, name"
            )
        ]

    def _decoded(self, component: str, name: str, report: bytes) -> ComponentReport:
        """All are asked for with every heartbeat of each; most have said nothing new since."""
        known = self._reports.get((component, name))
        if known is None or known[0] != report:
            known = self._reports[component, name] = (report, decode(report, ComponentReport))
        return known[1]


def _place(said: ComponentReport | RelayPlace) -> tuple[str, str]:
    return (said.relay if isinstance(said, ComponentReport) else said.url, said.region)
