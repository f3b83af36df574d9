"""The real service on the real ledger, driven at random and compared with what its clients were told.

A random walk alone almost never fills a batch, so there are macro rules (a group to its end, a batch, a death of each
component, a restart, a fault in mid-transaction) and a drain at the end: the run must still finish, balanced.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from astraflow.dataflow.settings import Limits
from astraflow.dataflow.verify import verify
from astraflow.errors import (
    BadRequest,
    Closed,
    Fenced,
    NameTaken,
    Pruned,
    StorageFull,
    UnknownLease,
    VersionConflict,
)
from astraflow.testing.simulator.checks import check_ledger
from astraflow.testing.simulator.edges import watch
from astraflow.types import Batch, FailureKind, Lease
from astraflow.wire import messages as m
from astraflow.wire.codec import encode
from tests.unit.dataflow.counted import assert_counted
from tests.unit.dataflow.rig import Rig, make_spec, manifest, tasks

STEPS, BOUND, PER_BATCH, SIZE = 4, 1, 2, 2
WORKERS = ("a", "b")
TABLES = ("policies", "publications", "trainers", "evals", "groups", "group_policy", "episodes", "payloads", "samples")
TABLES += ("batches", "batch_groups", "algorithms", "pruned_groups")


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(self.spec())
        watch(self.rig.service.ledger.store.connection)
        self.held: dict[str, list[Lease]] = {name: [] for name in WORKERS}
        self.incarnation = dict.fromkeys(WORKERS, 0)
        self.lost: list[Lease] = []
        """Leases of workers that died or were told that they lost them: they may still submit, late."""
        self.given: set[str] = set()
        self.acknowledged: set[tuple[int, int]] = set()
        self.accepted: list[tuple[Lease, str]] = []
        self.trained: list[tuple[int, bytes, list[tuple[str, int]]]] = []
        """The trainer's own surviving record: (batch, its bytes, (sample_id, use) of its rows)."""
        self.weights: list[str] = [manifest("p").digest]
        """Digest per version of the surviving history."""
        self.frozen: dict[int, bytes] = {}
        self.issued: Batch | None = None
        self.epoch = self.rig.resume(incarnation="t0")
        self.lives = 0
        self.silent = 0
        self.oldest: int | None = None
        """Version of the oldest checkpoint on the trainer's disk; None: it would begin at version 0."""

    @staticmethod
    def spec() -> Any:
        limits = Limits(starved_after_s=1e9, no_signal_limit=10_000, first_failures=10_000)
        return make_spec(steps=STEPS, max_staleness=BOUND, groups_per_batch=PER_BATCH, limits=limits, source=tasks(997))

    # ── workers ──

    @rule(worker=st.sampled_from(WORKERS), count=st.integers(1, 4))
    def lease(self, worker: str, count: int) -> None:
        reply = self.rig.lease(count, worker=worker, incarnation=self._inc(worker))
        for lease in reply.leases:
            assert lease.id not in self.given, f"lease {lease.id} was given twice"
            self.given.add(lease.id)
        self.held[worker] += reply.leases

    def _inc(self, worker: str) -> str:
        return f"{worker}{self.incarnation[worker]}"

    @rule(worker=st.sampled_from(WORKERS))
    def renew(self, worker: str) -> None:
        reply = self.rig.renew(self.held[worker], worker=worker, incarnation=self._inc(worker))
        self.lost += [x for x in self.held[worker] if x.id in reply.lost]
        self.held[worker] = [x for x in self.held[worker] if x.id not in reply.lost]

    @rule(worker=st.sampled_from(WORKERS), reward=st.sampled_from((0.0, 1.0)), pick=st.integers(0, 9))
    def submit(self, worker: str, reward: float, pick: int) -> None:
        if self.held[worker]:
            lease = self.held[worker].pop(pick % len(self.held[worker]))
            self._submit(lease, worker, reward)

    @precondition(lambda self: self.lost)
    @rule(pick=st.integers(0, 9))
    def submit_late(self, pick: int) -> None:
        self._submit(self.lost.pop(pick % len(self.lost)), "a", 1.0)

    @precondition(lambda self: self.accepted)
    @rule(pick=st.integers(0, 99))
    def submit_again(self, pick: int) -> None:
        """The acknowledgement was lost on the way: the same answer again, and nothing changes."""
        lease, worker = self.accepted[pick % len(self.accepted)]
        before = self._dump()
        assert self.rig.submit(lease, 0.5, worker=worker).duplicate
        assert self._dump() == before

    def _submit(self, lease: Lease, worker: str, reward: float, *, age: int = 0) -> None:
        version = max(0, len(self.weights) - 1 - age)
        episode = self.rig.episode(lease, reward, spans=[(version, self.weights[version])])
        row = self.rig.db.one(
            "SELECT state, attempt FROM episodes WHERE group_id = ? AND idx = ?", lease.group, lease.index
        )
        try:
            reply = self.rig.submit(lease, episode=episode, worker=worker)
        except Fenced:
            assert lease.attempt < row[1]
        except Closed:
            assert row[0] in ("given_up", "done")
        else:
            assert not reply.duplicate
            assert lease.attempt == row[1], "an older attempt was accepted"
            assert (lease.group, lease.index) not in self.acknowledged, "accepted twice"
            self.acknowledged.add((lease.group, lease.index))
            self.accepted.append((lease, worker))

    @rule(worker=st.sampled_from(WORKERS), kind=st.sampled_from(tuple(FailureKind)))
    def fail(self, worker: str, kind: FailureKind) -> None:
        if self.held[worker]:
            lease = self.held[worker].pop()
            try:
                self.rig.submit_failed(lease, kind)
            except (Fenced, Closed):
                return

    @rule(worker=st.sampled_from(WORKERS))
    def hand_back(self, worker: str) -> None:
        if not self.held[worker]:  # else chance would hardly ever bring a worker that has something to give
            self.lease(worker, 1)
        held = tuple(lease.id for lease in self.held[worker])
        self.rig.go(self.rig.flow.hand_back(m.HandBackRequest(worker=worker, held=held)))
        nobody = self.rig.db.number("SELECT COUNT(*) FROM episodes WHERE state = 'leased' AND worker IS NULL")
        assert nobody == 0, "a lease without a holder"
        self.held[worker] = []

    @rule(worker=st.sampled_from(WORKERS))
    def worker_death(self, worker: str) -> None:
        """Its successor comes after two silent heartbeats; the old process's results may still arrive."""
        self.lost += self.held[worker]
        self.held[worker] = []
        self.rig.advance(4.0)
        self.incarnation[worker] += 1
        self.lease(worker, 1)
        try:
            self.rig.renew(worker=worker, incarnation=f"{worker}old")
        except NameTaken:
            return
        raise AssertionError("two live processes share a name")

    @rule(seconds=st.sampled_from((1.0, 5.0, 11.0)))
    def advance(self, seconds: float) -> None:
        self.rig.advance(seconds)

    @rule(count=st.integers(1, 3), flat=st.booleans(), age=st.integers(0, 3))
    def run_groups_to_the_end(self, count: int, flat: bool, age: int) -> None:
        self._play(count * SIZE, flat=flat, age=age)

    def _play(self, episodes: int, *, flat: bool = False, age: int = 0) -> int:
        """By weights that are ``age`` versions old: a slow worker's."""
        reply = self.rig.lease(episodes, worker="a", incarnation=self._inc("a"))
        for lease in reply.leases:
            self.given.add(lease.id)
            self._submit(lease, "a", 1.0 if flat else float(lease.index % 2), age=age)
        return len(reply.leases)

    # ── the trainer ──

    @rule()
    def fill_a_batch(self) -> None:
        for _ in range(6):
            if self.take() is not None or not self._play(PER_BATCH * SIZE):
                return

    def take(self) -> Batch | None:
        reply = self.rig.batch(self.epoch)
        assert reply.finished == (len(self.trained) == STEPS)
        if reply.batch is None:
            return None
        batch = reply.batch
        assert batch.version == len(self.trained), "the step would start from other weights"
        assert batch.trainer_epoch == self.epoch
        if self.issued is not None:
            assert batch.id == self.issued.id, "another batch while one is out"
        self._check_rows(batch)
        self.issued = batch
        return batch

    def _check_rows(self, batch: Batch) -> None:
        frozen = encode(msgspec.structs.replace(batch, trainer_epoch=0, version=0))
        assert self.frozen.setdefault(batch.id, frozen) == frozen, "a batch was issued again with other bytes"
        groups = Counter(row.sample_id.split("/")[0] for row in batch.rows)
        assert len(groups) == PER_BATCH
        done = {key for _, _, rows in self.trained for key in rows}
        for row in batch.rows:
            assert (row.sample_id, row.use) not in done, f"{row.sample_id} would be trained twice"
            age = batch.version - min(span.version for span in row.spans)
            assert age <= BOUND, f"{row.sample_id} is {age} versions old"
        assert batch.tokens == sum(int(row.mask.sum()) for row in batch.rows)

    @precondition(lambda self: self.issued is not None)
    @rule(lost_answer=st.booleans())
    def commit(self, lost_answer: bool) -> None:
        batch = self.issued
        assert batch is not None
        salt = f"{self.lives}"
        reply = self.rig.commit(batch, salt=salt, oldest=self.oldest)
        assert (reply.duplicate, reply.version) == (False, len(self.trained) + 1)
        if lost_answer:
            assert self.rig.commit(batch, salt=salt).duplicate
        rows = [(row.sample_id, row.use) for row in batch.rows]
        self.trained.append((batch.id, self.frozen[batch.id], rows))
        self.weights.append(manifest("p", reply.version, salt=salt).digest)
        self.issued = None
        self.silent = 0

    @precondition(lambda self: self.issued is not None)
    @rule()
    def commit_without_signal(self) -> None:
        batch = self.issued
        assert batch is not None
        assert self.rig.commit(batch, reason="no_signal").version == len(self.trained)
        self.issued = None

    @rule(back=st.integers(0, STEPS))
    def trainer_death(self, back: int) -> None:
        """It comes back with a checkpoint that is ``back`` steps older; its weights decide what was trained."""
        zombie, held = self.epoch, self.issued
        again = self._resume(back)
        self._fenced(zombie, held)
        if again:
            batch = self.take()
            assert batch is not None and batch.id == again[0], "what was undone must come first, in order"

    def _resume(self, back: int) -> list[int]:
        """Returns the batches that come again."""
        self.lives += 1
        version = max(self._pruned_to(), len(self.trained) - back)
        reply = self.rig.resume_at("p", version, self.weights[version], incarnation=f"t{self.lives}")
        again = [batch for batch, _, _ in self.trained[version:]]
        assert list(reply.undone) == again
        self.trained, self.weights = self.trained[:version], self.weights[: version + 1]
        self.epoch, self.issued = reply.trainer_epoch, None
        if self.oldest is not None and version < self.oldest:
            self.oldest = version or None  # its disk had lost the checkpoints that it once told of
        return again

    @precondition(lambda self: self.trained)
    @rule(back=st.integers(0, 2))
    def older_checkpoints_go(self, back: int) -> None:
        """The trainer keeps none older than this one from now on; with its next commit it says so."""
        version = len(self.trained) - back
        if version > (self.oldest or 0):
            self.oldest = version

    @rule()
    def steps_and_pruning(self) -> None:
        """A step under a checkpoint of everything before it, and what it covers goes; nothing else."""
        self.oldest = len(self.trained) or self.oldest
        self.fill_a_batch()
        if self.issued is not None:
            self.commit(lost_answer=False)
        self.rig.advance(1.0)

    @precondition(lambda self: self._pruned_to() > 0)
    @rule()
    def resume_further_back_than_pruned(self) -> None:
        before, version = self._dump(), self._pruned_to() - 1
        try:
            self.rig.resume_at("p", version, self.weights[version], incarnation=f"lost{self.lives}")
        except Pruned:
            assert self._dump() == before
            return
        raise AssertionError(f"resumed at {version}, whose next batch is pruned")

    def _pruned_to(self) -> int:
        """Version that the newest pruned step made."""
        return self.rig.db.number(
            "SELECT MAX(version) + 1 FROM batches WHERE state = 'committed' AND rows IS NULL AND file IS NULL"
        )

    def _fenced(self, zombie: int, held: Batch | None) -> None:
        calls: list[Callable[[], Any]] = [lambda: self.rig.batch(zombie)]
        if held is not None:
            calls.append(lambda: self.rig.commit(held))
        for call in calls:
            try:
                call()
            except Fenced:
                continue
            raise AssertionError("a trainer of the past was served")

    @rule(age=st.integers(1, 3))
    def steps_and_old_groups(self, age: int) -> None:
        """Two steps, and then groups of old weights that want to be in the third."""
        for _ in range(2):
            self.fill_a_batch()
            if self.issued is not None:
                self.commit(lost_answer=False)
        self._play(PER_BATCH * SIZE, age=age)
        self.take()

    @rule()
    def steps_and_death(self) -> None:
        """Two steps, a third batch under way, and back before all of them."""
        for _ in range(2):
            self.fill_a_batch()
            if self.issued is not None:
                self.commit(lost_answer=False)
        self.fill_a_batch()
        self.trainer_death(2)

    # ── dataflow ──

    @rule()
    def restart(self) -> None:
        self.rig.restart(self.spec())

    @rule(fuse=st.integers(0, 40), refusal=st.booleans(), what=st.sampled_from(("lease", "play", "commit", "resume")))
    def fault_in_mid_transaction(self, fuse: int, refusal: bool, what: str) -> None:
        """The disk is full, or a transition is refused, after ``fuse`` statements: all or nothing."""
        store = self.rig.service.ledger.store
        real, burnt = store.run, [fuse]

        def run(sql: str, *values: Any) -> sqlite3.Cursor:
            if not store.connection.in_transaction or sql.startswith(("ROLLBACK", "RELEASE")):
                return real(sql, *values)
            if refusal and sql.startswith("SAVEPOINT"):  # before its transition was asked, nothing refuses
                return real(sql, *values)
            if burnt[0] == 0:
                burnt[0] = -1
                raise BadRequest("injected") if refusal else sqlite3.OperationalError("database or disk is full")
            burnt[0] -= 1
            return real(sql, *values)

        before = self._dump()
        store.run = run  # type: ignore[assignment]
        try:
            done = self._attempt(what)
        finally:
            store.run = real
        if not done:
            assert self._dump() == before, f"a {what} that failed changed something"

    def _attempt(self, what: str) -> bool:
        """One call, and whether it succeeded: then it counts."""
        try:
            if what == "lease":
                self.lease("b", 2)
            elif what == "play":
                if not self.held["b"]:
                    return True
                lease = self.held["b"][-1]
                self._submit(lease, "b", 1.0)
                self.held["b"].remove(lease)
            elif what == "commit":
                if self.issued is None:
                    return True
                self.commit(lost_answer=False)
            else:
                self._resume(1)
        except (StorageFull, BadRequest, UnknownLease, VersionConflict):
            return False
        return True

    # ── what always holds ──

    def _dump(self) -> list[list[tuple[Any, ...]]]:
        db = self.rig.service.ledger.store
        return [db.all(f"SELECT * FROM {table}") for table in TABLES]

    @invariant()
    def balanced(self) -> None:
        self.rig.balanced()
        assert self._pruned_to() <= (self.oldest or 0), "rows are gone that a resume may ask for"
        ledger = self.rig.service.ledger
        assert_counted(ledger)
        connection = ledger.store.connection
        assert check_ledger(connection) == []
        assert verify(connection).differences == (), "the tables are not what the events tell"

    @invariant()
    def what_was_acknowledged_is_stored(self) -> None:
        done = set(self.rig.db.all("SELECT group_id, idx FROM episodes WHERE state = 'done'"))
        cancelled = set(self.rig.db.all("SELECT group_id, idx FROM episodes WHERE state = 'given_up'"))
        assert self.acknowledged <= done | cancelled
        assert self.rig.digest("p")[1] == self.weights[-1], "workers follow other weights than the trainer's"

    def teardown(self) -> None:
        try:
            self._drain()
        finally:
            self.rig.close()

    def _drain(self) -> None:
        """Nothing fails any more: the run must end, with everything in its place."""
        self.rig.advance(11.0)
        assert self.rig.states("episodes").get("leased", 0) == 0, "a lease outlived its term"
        for _ in range(60):
            if len(self.trained) == STEPS:
                break
            if self.take() is not None:
                self.commit(lost_answer=False)
            elif not self._play(PER_BATCH * SIZE):
                self.rig.advance(11.0)
        assert len(self.trained) == STEPS, "the run stands still"
        assert self.rig.service.ledger.state == "finished"
        self.balanced()
        counts = Counter(key for _, _, rows in self.trained for key in rows)
        assert max(counts.values()) == 1
        ledger = set(self.rig.db.all("SELECT group_id || '/' || idx || '/' || agent || '/' || n FROM samples "
                                     "WHERE state = 'trained'"))  # fmt: skip
        fresh = {(sample_id,) for sample_id, use in counts if use == 0}
        assert ledger == fresh, "the ledger tells another story than the trainer"
