"""What a run counts, told again from its events: counters, batches and groups in a row without use, and the digest of
what the algorithms know.

Told before ``Retelling`` hears of the same event: some counts depend on the state that it ends.

| compared                             | by                                                              |
| ------------------------------------ | --------------------------------------------------------------- |
| counters                             | counting their events; those in ``NOT_TOLD`` leave no event     |
| ``no_signal``, ``barren`` per policy | the same; unknown from a starved spell on until they begin anew |
| state of the algorithms              | the digest that each decision which changed it leaves           |

The last says that the row is what was written; whether that is what the decisions make of it, ``run.replay.rederive``
tells, which has the recipe.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection

from astraflow.dataflow.retelling import ROLLED_BACK, Retelling, Told

NOT_TOLD = ("closed", "duplicates", "fenced")
"""Counters of calls that changed nothing, of which there is no event."""


def state_digest(state: bytes) -> str:
    return hashlib.sha256(state).hexdigest()[:32]


class Tally:
    """``supervised``: ids of the groups that only tokenise rows, which is not in the events."""

    def __init__(self, policies: Collection[str], supervised: Collection[int]) -> None:
        self.counters: Counter[str] = Counter()
        self.no_signal: dict[str, int | None] = dict.fromkeys(policies, 0)
        """None: not known."""
        self.barren: dict[str, int | None] = dict.fromkeys(policies, 0)
        self.algorithms: str | None = None
        """None: no event tells."""
        self._supervised = supervised
        self._cancelled: set[int] = set()
        self._starved: set[str] = set()
        """Within a spell, in which what is counted in a row may begin anew unsaid."""

    def tell(self, event: Told, story: Retelling) -> None:
        step = getattr(self, f"_on_{event.kind}", None)
        if step is not None:
            step(event, story)

    # ── episodes and groups ──

    def _on_done(self, event: Told, story: Retelling) -> None:
        self._late(event, story)
        self.counters["episodes_done"] += 1
        if event.group in self._supervised:
            self.counters["supervised_done"] += 1

    def _on_failed(self, event: Told, story: Retelling) -> None:
        self._late(event, story)
        self.counters[f"failed/{event.data.get('failure')}"] += 1
        if event.data.get("again"):
            self.counters["retries"] += 1

    def _late(self, event: Told, story: Retelling) -> None:
        """Its lease had run out, and nobody had been given the next one."""
        group, idx = story.groups.get(event.group or 0), event.idx
        if group is not None and idx is not None and idx < len(group.episodes):
            self.counters["late"] += group.episodes[idx].state == "pending"

    def _on_handed_back(self, event: Told, story: Retelling) -> None:
        self.counters["handed_back"] += 1

    def _on_kept(self, event: Told, story: Retelling) -> None:
        self._anew(self.barren, event.policy)

    def _on_dropped(self, event: Told, story: Retelling) -> None:
        if _state(event, story) == "ready":
            self._more(self.barren, event.policy)

    def _on_stale(self, event: Told, story: Retelling) -> None:
        before = _state(event, story)
        if before == "ready":
            self._more(self.barren, event.policy)
        if before == "open" and event.group is not None and event.group not in self._cancelled:
            self._cancelled.add(event.group)
            self.counters["cancelled_groups"] += 1

    # ── batches and policies ──

    def _on_cut(self, event: Told, story: Retelling) -> None:
        self._starved.discard(event.policy or "")
        self.counters["replayed"] += len(event.data.get("replayed", ()))

    def _on_committed(self, event: Told, story: Retelling) -> None:
        self._anew(self.no_signal, event.policy)

    def _on_resumed(self, event: Told, story: Retelling) -> None:
        self._anew(self.no_signal, event.policy)

    def _on_batch_dropped(self, event: Told, story: Retelling) -> None:
        if event.data.get("reason") != ROLLED_BACK:
            self._more(self.no_signal, event.policy)

    def _on_undone(self, event: Told, story: Retelling) -> None:
        self.counters["undone_batches"] += 1

    def _on_unfrozen(self, event: Told, story: Retelling) -> None:
        self._anew(self.no_signal, event.policy)
        self._anew(self.barren, event.policy)

    def _on_added(self, event: Told, story: Retelling) -> None:
        self._on_unfrozen(event, story)

    def _on_goes_on(self, event: Told, story: Retelling) -> None:
        self._starved.clear()
        for counts in (self.no_signal, self.barren):
            counts.update(dict.fromkeys(counts, 0))

    def _on_starved(self, event: Told, story: Retelling) -> None:
        policy = event.policy or ""
        self.counters["starved"] += 1
        self._starved.add(policy)
        self.no_signal[policy] = self.barren[policy] = None

    # ── the rest ──

    def _on_dead(self, event: Told, story: Retelling) -> None:
        self.counters[f"dead/{event.data.get('component')}"] += 1

    def _on_algorithms(self, event: Told, story: Retelling) -> None:
        self.algorithms = event.data.get("digest")

    def _anew(self, counts: dict[str, int | None], policy: str | None) -> None:
        counts[policy or ""] = None if policy in self._starved else 0

    def _more(self, counts: dict[str, int | None], policy: str | None) -> None:
        before = counts.get(policy or "")
        counts[policy or ""] = None if before is None else before + 1


def _state(event: Told, story: Retelling) -> str | None:
    """Of the event's group for its policy, before it."""
    group = story.groups.get(event.group or 0)
    found = group.policies.get(event.policy or "") if group is not None else None
    return None if found is None else found.state
