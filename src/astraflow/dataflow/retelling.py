"""The states of a run, told again from its events alone: the log that only grows, and nothing else, is the input.

``Retelling.tell`` takes one event after the other, in their order. What cannot follow from the events before it is
noted in ``breaks``. ``verify`` compares the end of the story with the tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WAITING = ("pending", "leased")
ROLLED_BACK = "rolled_back"


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """One row of the log."""

    id: int
    kind: str
    group: int | None
    idx: int | None
    policy: str | None
    batch: int | None
    data: Mapping[str, Any]


@dataclass(slots=True)
class EpisodeStory:
    state: str = "pending"
    attempt: int = 0
    failures: int = 0
    worker: str | None = None
    """While it is leased."""
    outcome: str | None = None
    """Of a done one."""
    kind: str | None = None
    score: float | None = None
    samples: Mapping[str, int] | None = field(default_factory=dict)
    """Stored, by policy; None: the event is of a program that did not say."""


@dataclass(slots=True)
class PolicyStory:
    """What a group is for one policy."""

    state: str = "open"
    reason: str | None = None
    batch: int | None = None
    version: int | None = None
    masked: int | None = 0
    """Samples without a row in its batch; None: not said."""


@dataclass(slots=True)
class GroupStory:
    purpose: str
    size: int
    task: str
    episodes: list[EpisodeStory]
    policies: dict[str, PolicyStory]
    arrival: int | None = None

    @property
    def left(self) -> int:
        return sum(each.state in WAITING for each in self.episodes)

    @property
    def state(self) -> str:
        if self.left:
            return "open"
        return "ready" if any(each.state in ("open", "ready") for each in self.policies.values()) else "closed"


@dataclass(slots=True)
class BatchStory:
    policy: str
    version: int
    tokens: int
    sequences: int
    groups: Sequence[int]
    fresh: Sequence[int]
    state: str = "cut"
    reason: str | None = None
    trainer_epoch: int = 0
    failures: int = 0
    pruned: bool = False


@dataclass(slots=True)
class Stream:
    """Of one policy."""

    version: int = 0
    serial: int = 0
    trainer_epoch: int = 0
    trainer: tuple[str, int, int] | None = None
    """Name, version resumed at, trainer_epoch."""


@dataclass(slots=True)
class EvalStory:
    policy: str
    version: int
    state: str = "open"
    score: float | None = None
    coverage: float | None = None


class Retelling:
    def __init__(self, policies: Sequence[str], trainable: Sequence[str]) -> None:
        self._trainable = list(trainable)
        self.streams = {name: Stream() for name in policies}
        self.publications: dict[tuple[str, int], tuple[int, str]] = {}
        self.groups: dict[int, GroupStory] = {}
        self.batches: dict[int, BatchStory] = {}
        self.evals: dict[int, EvalStory] = {}
        self.components: dict[tuple[str, str], str] = {}
        self.pruned: dict[int, tuple[int, int]] = {}
        """Group → (episodes, bytes)"""
        self.run_state = "running"
        self.breaks: list[str] = []
        self._last = 0

    def tell(self, event: Told) -> None:
        """Kinds without a state of their own are passed over."""
        if event.id != self._last + 1:
            self.breaks.append(f"events {self._last + 1} to {event.id - 1} are missing")
        self._last = event.id
        step = getattr(self, f"_on_{event.kind}", None)
        if step is None:
            return
        try:
            step(event)
        except (KeyError, IndexError, TypeError, AssertionError) as error:
            self.breaks.append(f"event {event.id} ({event.kind}) names what was never told of: {error!r}")

    def _from(self, event: Told, what: str, state: str, allowed: Sequence[str]) -> None:
        if state not in allowed:
            self.breaks.append(f"event {event.id}: {what} is {state}, it cannot be {event.kind}")

    # ── episodes ──

    def _episode(self, event: Told, allowed: Sequence[str]) -> EpisodeStory:
        assert event.group is not None and event.idx is not None
        found = self.groups[event.group].episodes[event.idx]
        self._from(event, f"episode {event.group}/{event.idx}", found.state, allowed)
        return found

    def _on_admitted(self, event: Told) -> None:
        assert event.group is not None
        train, size = event.data["purpose"] == "train", event.data["size"]
        self.groups[event.group] = GroupStory(
            purpose=event.data["purpose"],
            size=size,
            task=event.data["task"],
            episodes=[EpisodeStory() for _ in range(size)],
            policies={policy: PolicyStory() for policy in self._trainable if train},
        )

    def _on_leased(self, event: Told) -> None:
        episode = self._episode(event, ("pending",))
        episode.state, episode.worker = "leased", event.data["worker"]
        episode.attempt += 1
        if episode.attempt != event.data["attempt"]:
            self.breaks.append(
                f"event {event.id}: attempt {event.data['attempt']} of episode {event.group}/{event.idx} "
                f"follows attempt {episode.attempt - 1}"
            )

    def _on_handed_back(self, event: Told) -> None:
        self._episode(event, ("leased",)).state = "pending"

    def _on_failed(self, event: Told) -> None:
        episode = self._episode(event, WAITING)
        episode.failures += 1
        if event.data["again"]:
            episode.state = "pending"

    def _on_given_up(self, event: Told) -> None:
        episode = self._episode(event, WAITING)
        episode.state, episode.kind = "given_up", event.data["failure"]
        # A cancelled episode has none; of an older program's others nothing is known.
        episode.samples = event.data.get("samples", {} if episode.kind == "cancelled" else None)

    def _on_done(self, event: Told) -> None:
        episode = self._episode(event, WAITING)
        episode.state, episode.outcome, episode.worker = "done", event.data["outcome"], event.data["worker"]
        episode.score, episode.samples = event.data["score"], event.data.get("samples")

    # ── groups ──

    def _policy(self, event: Told, allowed: Sequence[str]) -> PolicyStory:
        assert event.group is not None and event.policy is not None
        found = self.groups[event.group].policies[event.policy]
        self._from(event, f"group {event.group} of {event.policy}", found.state, allowed)
        return found

    def _on_ready(self, event: Told) -> None:
        assert event.group is not None
        group = self.groups[event.group]
        if group.left:
            self.breaks.append(f"event {event.id}: group {event.group} is ready with {group.left} episodes to come")
        group.arrival = event.data["arrival"]
        for policy in group.policies.values():
            policy.state = "ready"

    def _on_kept(self, event: Told) -> None:
        self._policy(event, ("ready",)).state = "kept"

    def _on_dropped(self, event: Told) -> None:
        found = self._policy(event, ("ready", "kept"))
        found.state, found.reason = "dropped", event.data["reason"]

    def _on_stale(self, event: Told) -> None:
        self._policy(event, ("open", "ready", "kept")).state = "stale"

    def _on_pruned(self, event: Told) -> None:
        if event.batch is not None:
            self.batches[event.batch].pruned = True
            return
        assert event.group is not None
        if self.groups[event.group].state != "closed":
            self.breaks.append(f"event {event.id}: group {event.group} is pruned, but not closed")
        self.pruned[event.group] = (event.data["episodes"], event.data["bytes"])

    # ── batches ──

    def _batch(self, event: Told, allowed: Sequence[str]) -> BatchStory:
        assert event.batch is not None
        found = self.batches[event.batch]
        self._from(event, f"batch {event.batch}", found.state, allowed)
        return found

    def _to_groups(
        self, batch: BatchStory, state: str, *, reason: str | None = None, version: int | None = None
    ) -> None:
        for group in batch.fresh:
            found = self.groups[group].policies[batch.policy]
            found.state, found.reason, found.version = state, reason, version

    def _on_cut(self, event: Told) -> None:
        assert event.batch is not None and event.policy is not None
        data = event.data
        replayed = data.get("replayed", ())
        fresh = [group for group in data["groups"] if group not in replayed]
        batch = BatchStory(
            policy=event.policy,
            version=data["version"],
            tokens=data["tokens"],
            sequences=data["sequences"],
            groups=data["groups"],
            fresh=fresh,
        )
        self.batches[event.batch] = batch
        for group in replayed:
            self._from(event, f"group {group} of {event.policy}", self._state(group, event.policy), ("trained",))
        masked = data.get("masked")
        for group in fresh:
            found = self.groups[group].policies[event.policy]
            self._from(event, f"group {group} of {event.policy}", found.state, ("kept",))
            found.state, found.batch = "batched", event.batch
            found.masked = None if masked is None else masked.get(str(group), 0)

    def _state(self, group: int, policy: str) -> str:
        return self.groups[group].policies[policy].state

    def _on_issued(self, event: Told) -> None:
        batch = self._batch(event, ("cut", "issued"))
        batch.state, batch.trainer_epoch, batch.version = "issued", event.data["trainer_epoch"], event.data["version"]

    def _on_committed(self, event: Told) -> None:
        batch = self._batch(event, ("issued", "cut") if event.kind == "committed_again" else ("issued",))
        batch.state, batch.reason = "committed", None if event.kind == "committed" else batch.reason
        version = event.data["version"]
        self.streams[batch.policy].version = version
        self._to_groups(batch, "trained", version=version)

    _on_committed_again = _on_committed

    def _on_batch_failed(self, event: Told) -> None:
        batch = self._batch(event, ("issued",))
        batch.state, batch.failures = "cut", event.data["failures"]

    def _on_undone(self, event: Told) -> None:
        batch = self._batch(event, ("committed",))
        if batch.pruned:
            self.breaks.append(f"event {event.id}: batch {event.batch} is undone, but its rows are pruned")
        batch.state = "cut"
        self._to_groups(batch, "batched")

    def _on_batch_dropped(self, event: Told) -> None:
        reason = event.data["reason"]
        batch = self._batch(event, ("issued", "cut", "committed") if reason == ROLLED_BACK else ("issued",))
        batch.state, batch.reason = "dropped", reason
        self._to_groups(batch, "dropped", reason=reason)

    # ── policies ──

    def _on_added(self, event: Told) -> None:
        assert event.policy is not None
        self.streams[event.policy] = Stream()
        if event.data["trainable"]:
            self._trainable.append(event.policy)

    def _on_published(self, event: Told) -> None:
        assert event.policy is not None
        data = event.data
        self.streams[event.policy].serial = data["serial"]
        self.publications[event.policy, data["serial"]] = (data["version"], data["digest"])

    def _on_resumed(self, event: Told) -> None:
        assert event.policy is not None
        stream, data = self.streams[event.policy], event.data
        if data["version"] < stream.version:
            self._goes_on_from_the_end()
        stream.version, stream.trainer_epoch = data["version"], data["trainer_epoch"]
        stream.trainer = (data["trainer"], data["version"], data["trainer_epoch"])
        for batch in self.batches.values():
            if batch.policy == event.policy and batch.state == "issued":
                batch.state = "cut"

    def _on_rolled_back(self, event: Told) -> None:
        assert event.policy is not None
        stream = self.streams[event.policy]
        stream.version, stream.trainer = event.data["version"], None
        stream.trainer_epoch += 1
        self._goes_on_from_the_end()

    # ── the run ──

    def _goes_on_from_the_end(self) -> None:
        if self.run_state == "finished":
            self.run_state = "running"

    def _on_finished(self, event: Told) -> None:
        self.run_state = "finished"

    def _on_failed_run(self, event: Told) -> None:
        self.run_state = "failed"

    def _on_goes_on(self, event: Told) -> None:
        self.run_state = "running"
        for batch in self.batches.values():
            if batch.state in ("cut", "issued"):
                batch.failures = 0

    def _on_eval_opened(self, event: Told) -> None:
        assert event.policy is not None
        number = event.data.get("eval", len(self.evals) + 1)
        self.evals[number] = EvalStory(policy=event.policy, version=event.data["version"])

    def _on_eval_done(self, event: Told) -> None:
        found = self.evals[event.data["eval"]]
        found.state, found.score, found.coverage = "done", event.data["score"], event.data["coverage"]

    def _on_joined(self, event: Told) -> None:
        self.components[event.data["component"], event.data["name"]] = "alive"

    _on_alive = _on_joined

    def _on_dead(self, event: Told) -> None:
        self.components[event.data["component"], event.data["name"]] = "dead"

    def _on_left(self, event: Told) -> None:
        self.components[event.data["component"], event.data["name"]] = "left"
