"""Batches: frozen as bytes when cut, issued until committed, un-committed when a trainer resumes further back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from astraflow.dataflow.cut import Cut
from astraflow.dataflow.groups import Groups, place_of
from astraflow.dataflow.payloads import Payloads
from astraflow.dataflow.policies import Policies
from astraflow.dataflow.store import Row, Store
from astraflow.errors import BadRequest, VersionConflict
from astraflow.types import Batch, Manifest

REMEMBERED_BYTES = 64 << 20
"""A larger batch is decoded from the disk when it is issued."""


class Batches:
    def __init__(self, store: Store, policies: Policies, groups: Groups, payloads: Payloads) -> None:
        self._store = store
        self._policies = policies
        self._groups = groups
        self._payloads = payloads
        self._newest: dict[str, Batch] = {}
        """Per policy the batch that was frozen last, so that to issue it decodes nothing; a memory of the tables."""
        store.on_rollback.append(self._newest.clear)

    # ── out ──

    def head(self, policy: str) -> int | None:
        """The batch that comes next for a policy: un-committed ones first, in their order."""
        row = self._store.one(
            "SELECT id FROM batches WHERE policy = ? AND state IN ('cut', 'issued') ORDER BY version, id LIMIT 1",
            policy,
        )
        return row[0] if row else None

    def freeze(self, now: float, policy: str, cut: Cut, groups: Sequence[tuple[int, int]]) -> int:
        """A new batch of these (group, use); its rows never change again. Returns its id."""
        version = self._policies.versions[policy]
        batch = self._store.run(
            "INSERT INTO batches (policy, state, version, tokens, sequences, cut_at) VALUES (?, 'cut', ?, ?, ?, ?)",
            (policy, version, cut.tokens, cut.sequences, now),
        ).lastrowid
        assert batch is not None
        frozen = Batch(
            id=batch,
            policy=policy,
            version=version,
            trainer_epoch=0,
            tokens=cut.tokens,
            sequences=cut.sequences,
            rows=cut.rows,
        )
        size, file, body = self._payloads.pack(frozen)
        self._newest.pop(policy, None)
        if size <= REMEMBERED_BYTES:
            self._newest[policy] = frozen
        for group, _ in groups:
            self._payloads.forget(group)
        if body is not None:
            self._store.run("INSERT INTO batch_rows VALUES (?, ?)", (batch, body))
        self._store.run(
            "UPDATE batches SET file = ?, rows = ? WHERE id = ?", (file, None if body is None else size, batch)
        )
        self._store.run_many(
            "INSERT INTO batch_groups VALUES (?, ?, ?, ?)",
            [(batch, position, group, use) for position, (group, use) in enumerate(groups)],
        )
        self._store.run_many(
            "UPDATE group_policy SET state = 'batched', batch = ? WHERE group_id = ? AND policy = ?",
            [(batch, group, policy) for group, use in groups if use == 0],
        )
        self._keep_for_replay(policy, cut, groups)
        # What masks a sample of a replayed group is true of this use only: it was trained before.
        fresh = {group for group, use in groups if use == 0}
        self._store.run_many(
            "UPDATE samples SET mask = ? WHERE group_id = ? AND policy = ? AND idx = ? AND agent = ? AND n = ?",
            [(reason, group, policy, *place) for (group, *place), reason in _places(cut.masked) if group in fresh],
        )
        self._store.event(
            now, "cut", policy=policy, batch=batch, version=version, groups=[group for group, _ in groups],
            tokens=cut.tokens, sequences=cut.sequences, masked=_counts(cut.masked),
            replayed=[group for group, use in groups if use > 0],
            not_again=[sample_id for sample_id in cut.masked if int(sample_id.partition("/")[0]) not in fresh],
        )  # fmt: skip
        return batch

    def _keep_for_replay(self, policy: str, cut: Cut, groups: Sequence[tuple[int, int]]) -> None:
        """Fresh groups are remembered with the advantages that they are trained with."""
        self._store.run_many(
            "UPDATE group_policy SET verdict = ?1 WHERE group_id = ?2 AND policy = ?3 AND verdict <> ?1",
            [(cut.advantages[group].tobytes(), group, policy) for group, use in groups if use == 0],
        )
        replayed = sum(use > 0 for _, use in groups)
        if replayed:
            self._store.count("replayed", replayed)
            self._groups.forget_stored(policy)

    def issue(self, now: float, batch: int, trainer_epoch: int) -> Batch:
        """Hand the frozen batch to a trainer, again if need be: the same rows, order and bytes."""
        row = self._store.one("SELECT policy, state, trainer_epoch, failures FROM batches WHERE id = ?", batch)
        assert row is not None
        policy, state, epoch, failures = row
        version = self._policies.versions[policy]
        frozen = self._frozen(policy, batch)
        if (state, epoch) != ("issued", trainer_epoch):
            # An un-committed batch may start one version lower than it did: where a step before it had no signal.
            self._store.run(
                "UPDATE batches SET state = 'issued', trainer_epoch = ?, version = ? WHERE id = ?",
                (trainer_epoch, version, batch),
            )
            self._store.event(now, "issued", policy=policy, batch=batch, trainer_epoch=trainer_epoch, version=version)
        return msgspec.structs.replace(frozen, trainer_epoch=trainer_epoch, version=version, failures=failures)

    def _frozen(self, policy: str, batch: int) -> Batch:
        newest = self._newest.get(policy)
        if newest is not None and newest.id == batch:
            return newest
        row = self._store.one(
            "SELECT b.file, r.body FROM batches b LEFT JOIN batch_rows r ON r.batch = b.id WHERE b.id = ?", batch
        )
        assert row is not None
        return self._payloads.unpack(Batch, *row)

    # ── back ──

    def find(self, policy: str, batch: int) -> Row:
        """state, version, trainer_epoch, serial, reason. Raises BadRequest."""
        row = self._store.one(
            "SELECT state, version, trainer_epoch, serial, reason FROM batches WHERE id = ? AND policy = ?",
            batch,
            policy,
        )
        if row is None:
            raise BadRequest(f"policy {policy!r} has no batch {batch}")
        return row

    def commit(
        self, now: float, policy: str, batch: int, trainer_epoch: int, manifest: Manifest, metrics: Mapping[str, float]
    ) -> bool:
        """Version += 1 and its publication; False if this very commit was made before. Raises VersionConflict."""
        state, version, epoch, serial, _ = self.find(policy, batch)
        current = self._policies.versions[policy]
        if state == "committed" and epoch == trainer_epoch:
            row = self._store.one(
                "SELECT version, digest FROM publications WHERE policy = ? AND serial = ?", policy, serial
            )
            if row == (manifest.version, manifest.digest):
                return False
        self._require_issued(policy, batch, state, epoch, trainer_epoch)
        if manifest.policy != policy or manifest.version != current + 1 or version != current:
            raise VersionConflict(
                f"batch {batch} of {policy} makes version {current + 1}, "
                f"the manifest is version {manifest.version} of {manifest.policy}"
            )
        base = self._policies.newest[policy].digest
        published = self._policies.publish(now, manifest, trainer_epoch=trainer_epoch)
        self._policies.set_version(policy, current + 1)
        self._store.run(
            "UPDATE batches SET state = 'committed', reason = NULL, serial = ?, base = ?, metrics = ?, "
            "ended_at = ? WHERE id = ?",
            (published.serial, base, json.dumps(dict(metrics)), now, batch),
        )
        self._store.run("UPDATE policies SET no_signal = 0 WHERE name = ?", (policy,))
        self._to_groups(batch, policy, "trained", version=current + 1)
        self._newest.pop(policy, None)
        self._store.event(
            now, "committed", policy=policy, batch=batch, version=current + 1, trainer_epoch=trainer_epoch,
            metrics=dict(metrics),
        )  # fmt: skip
        return True

    def drop(
        self, now: float, policy: str, batch: int, trainer_epoch: int, reason: str, metrics: Mapping[str, float]
    ) -> bool:
        """A step that was none: groups dropped(reason), the version stays; False if dropped for that before."""
        state, _, epoch, _, before = self.find(policy, batch)
        if state == "dropped" and epoch == trainer_epoch and before == reason:
            return False
        self._require_issued(policy, batch, state, epoch, trainer_epoch)
        self._end_dropped(now, policy, batch, reason, metrics)
        self._store.run("UPDATE policies SET no_signal = no_signal + 1 WHERE name = ?", (policy,))
        return True

    def _end_dropped(
        self, now: float, policy: str, batch: int, reason: str, metrics: Mapping[str, float] | None = None
    ) -> None:
        self._store.run(
            "UPDATE batches SET state = 'dropped', reason = ?, metrics = ?, ended_at = ? WHERE id = ?",
            (reason, json.dumps(dict(metrics or {})), now, batch),
        )
        self._to_groups(batch, policy, "dropped", reason=reason)
        self._store.event(now, "batch_dropped", policy=policy, batch=batch, reason=reason)

    def _require_issued(self, policy: str, batch: int, state: str, epoch: int, trainer_epoch: int) -> None:
        if state != "issued" or epoch != trainer_epoch:
            raise VersionConflict(
                f"batch {batch} of {policy} is {state}, last with trainer epoch {epoch}: "
                f"epoch {trainer_epoch} does not hold it, ask for the next batch"
            )

    def _to_groups(
        self, batch: int, policy: str, state: str, *, reason: str | None = None, version: int | None = None
    ) -> None:
        """Fresh groups of the batch and their samples follow it."""
        store = self._store
        fresh = "SELECT group_id FROM batch_groups WHERE batch = ? AND use = 0"
        store.run(
            f"UPDATE group_policy SET state = ?, reason = ?, version = ? WHERE policy = ? AND group_id IN ({fresh})",
            (state, reason, version, policy, batch),
        )
        if state == "trained":
            assert version is not None
            store.run(
                "UPDATE samples SET state = CASE WHEN mask IS NULL THEN 'trained' ELSE 'masked' END, "
                "age = CASE WHEN mask IS NULL AND min_version IS NOT NULL THEN MAX(0, ? - min_version) END "
                f"WHERE policy = ? AND group_id IN ({fresh})",
                (version - 1, policy, batch),
            )
        else:
            store.run(
                f"UPDATE samples SET state = ?, age = NULL WHERE policy = ? AND group_id IN ({fresh})",
                ("held" if state == "batched" else state, policy, batch),
            )

    def fail(self, now: float, policy: str, batch: int, before: int | None, trainer_epoch: int, error: str) -> int:
        """It could not be trained: to be issued again. Returns how often so far.

        ``before``: its failures when it was issued; None: not known. A repeated call counts once, also one that was so
        long on its way that the batch is issued again.
        """
        state, _, epoch, _, _ = self.find(policy, batch)
        failures = self._store.number("SELECT failures FROM batches WHERE id = ?", batch)
        if state == "cut" or (before is not None and before < failures):
            return failures
        self._require_issued(policy, batch, state, epoch, trainer_epoch)
        self._store.run("UPDATE batches SET state = 'cut', failures = failures + 1 WHERE id = ?", (batch,))
        self._store.event(now, "batch_failed", policy=policy, batch=batch, error=error[:500], failures=failures + 1)
        return failures + 1

    # ── history ──

    def undo(self, now: float, policy: str, version: int) -> tuple[int, ...]:
        """Un-commit what was committed after ``version``: cut again, in order, before anything new."""
        store = self._store
        undone = store.all(
            "SELECT id FROM batches WHERE policy = ? AND state = 'committed' AND version >= ? ORDER BY version",
            policy,
            version,
        )
        for (batch,) in undone:
            store.run("UPDATE batches SET state = 'cut', ended_at = NULL WHERE id = ?", (batch,))
            self._to_groups(batch, policy, "batched")
            store.event(now, "undone", policy=policy, batch=batch)
        if undone:
            store.count("undone_batches", len(undone))
        self._policies.set_version(policy, version)
        return tuple(batch for (batch,) in undone)

    def redo(self, now: float, policy: str, manifest: Manifest) -> bool:
        """A trainer comes back with weights of a history that was un-committed: its batches are committed again.

        Only if every batch up to there waits, untouched, with the publication that it once made, and the first one
        was made from the weights of now.
        """
        store = self._store
        current, wanted = self._policies.versions[policy], manifest.version
        waiting = store.all(
            "SELECT b.id, b.base, p.digest FROM batches b "
            "JOIN publications p ON p.policy = b.policy AND p.serial = b.serial AND p.version = b.version + 1 "
            "WHERE b.policy = ? AND b.state IN ('cut', 'issued') AND b.version >= ? AND b.version < ? "
            "ORDER BY b.version, b.id",
            policy,
            current,
            wanted,
        )
        lineage = [self._policies.newest[policy].digest, *(digest for _, _, digest in waiting)]
        if len(waiting) != wanted - current or lineage[-1] != manifest.digest:
            return False
        if [base for _, base, _ in waiting] != lineage[:-1]:
            return False
        for step, (batch, _, _) in enumerate(waiting, start=current + 1):
            store.run("UPDATE batches SET state = 'issued' WHERE id = ? AND state = 'cut'", (batch,))
            store.run("UPDATE batches SET state = 'committed', ended_at = ? WHERE id = ?", (now, batch))
            self._to_groups(batch, policy, "trained", version=step)
            store.event(now, "committed_again", policy=policy, batch=batch, version=step)
        self._policies.set_version(policy, wanted)
        return True

    def release(self, policy: str) -> None:
        """The trainer that held a batch is fenced: nobody holds it."""
        # Both states, which is what the index of live batches is for: one alone would read every batch of the run.
        self._store.run("UPDATE batches SET state = 'cut' WHERE policy = ? AND state IN ('cut', 'issued')", (policy,))

    def roll_back(self, now: float, policy: str, version: int) -> tuple[int, ...]:
        """On purpose: everything after ``version`` is dropped(rolled_back), never to be trained again."""
        gone = self._store.all(
            "SELECT id FROM batches WHERE policy = ? AND (state IN ('cut', 'issued') "
            "OR (state = 'committed' AND version >= ?)) ORDER BY version, id",
            policy,
            version,
        )
        for (batch,) in gone:
            self._end_dropped(now, policy, batch, "rolled_back")
        self._policies.set_version(policy, version)
        return tuple(batch for (batch,) in gone)


def _counts(masked: Mapping[str, str]) -> dict[str, int]:
    """Samples without a row, by group, for the log."""
    return dict(Counter(sample_id.partition("/")[0] for sample_id in masked))


def _places(masked: Mapping[str, str]) -> list[tuple[tuple[int, int, str, int], str]]:
    return [((int(sample_id.split("/", 1)[0]), *place_of(sample_id)), reason) for sample_id, reason in masked.items()]
