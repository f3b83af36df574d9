"""A trainer resumes, commits, fails; an operator rolls back. Each one transition of the ledger."""

from __future__ import annotations

from astraflow.dataflow.components import TRAINER
from astraflow.dataflow.league import add, cast, freeze, swap, unfreeze
from astraflow.dataflow.ledger import Ledger
from astraflow.dataflow.retention import checkpoint_kept, forget_checkpoint, require_bytes
from astraflow.dataflow.starving import starve_without_signal
from astraflow.dataflow.sweeps import cancel_hopeless
from astraflow.errors import BadRequest, Fenced, UnknownVersion
from astraflow.observe.points import reach
from astraflow.types import Manifest
from astraflow.wire import messages as m
from astraflow.wire.codec import decode


def resume(ledger: Ledger, now: float, request: m.ResumeRequest) -> m.ResumeReply:
    """Register a trainer at its checkpoint; a repeated call changes nothing. Raises UnknownVersion, Pruned."""
    policies, store, policy = ledger.policies, ledger.store, request.policy
    policies.require(policy, trainable=True)
    key = (request.trainer, request.incarnation, request.version, request.digest)
    row = store.one("SELECT name, incarnation, version, digest, trainer_epoch FROM trainers WHERE policy = ?", policy)
    if row is not None and row[:4] == key:
        return _resumed(ledger, policy, row[4], ())
    if row is not None and row[1] != request.incarnation:
        _refuse_replaced(ledger, request, newer=row[0])
        _refuse_superseded(ledger, request)
    known = policies.at(policy, request.version, request.digest)
    if known is None:
        raise UnknownVersion(
            f"trainer {request.trainer!r} resumes {policy} at version {request.version} with digest "
            f"{request.digest[:12]}…, which was never published in run {ledger.spec.run}"
        )
    require_bytes(store, policy, request.version, f"trainer {request.trainer!r} of {policy}")
    undone: tuple[int, ...] = ()
    ledger.batches.release(policy)
    if request.version < policies.versions[policy]:
        undone = ledger.batches.undo(now, policy, request.version)
        if ledger.state == "finished":
            store.set("state", "running")
    elif request.version > policies.versions[policy] and not ledger.batches.redo(now, policy, known):
        raise UnknownVersion(
            f"version {request.version} of {policy} was un-committed and its batches were trained anew since: "
            f"resume from a checkpoint of version {policies.versions[policy]} or older"
        )
    epoch = store.number("SELECT trainer_epoch FROM policies WHERE name = ?", policy) + 1
    store.run("UPDATE policies SET trainer_epoch = ?, no_signal = 0 WHERE name = ?", (epoch, policy))
    forget_checkpoint(store, policy)
    store.run("INSERT OR REPLACE INTO trainers VALUES (?, ?, ?, ?, ?, ?, ?)", (policy, *key, epoch, now))
    _publish_resumed(ledger, now, request, known, epoch)
    store.event(
        now, "resumed", policy=policy, trainer=request.trainer, trainer_epoch=epoch, version=request.version,
        incarnation=request.incarnation, undone=list(undone),
    )  # fmt: skip
    return _resumed(ledger, policy, epoch, undone)


def _refuse_replaced(ledger: Ledger, request: m.ResumeRequest, *, newer: str) -> None:
    """A call of a process that was replaced came late, or came twice: it must not fence the one that replaced it."""
    before = ledger.store.collected("resumed", request.policy)
    epochs = [each["trainer_epoch"] for each in before if each["incarnation"] == request.incarnation]
    row = epochs[-1:] or ledger.store.one(
        "SELECT json_extract(data, '$.trainer_epoch') FROM events WHERE kind = 'resumed' AND policy = ? "
        "AND json_extract(data, '$.incarnation') = ? ORDER BY id DESC LIMIT 1",
        request.policy,
        request.incarnation,
    )
    if row is not None:
        raise Fenced(
            f"this process of trainer {request.trainer!r} had trainer epoch {row[0]} of {request.policy}, which "
            f"{newer!r} has replaced: a process that was replaced cannot resume, start a new one"
        )


def _refuse_superseded(ledger: Ledger, request: m.ResumeRequest) -> None:
    """The same of a process that never got so far: it registered, another took its name, and its calls came late."""
    store, name = ledger.store, request.trainer
    rows = store.all(
        "SELECT json_extract(data, '$.incarnation') FROM events WHERE kind = 'joined' "
        "AND json_extract(data, '$.component') = ? AND json_extract(data, '$.name') = ? ORDER BY id",
        TRAINER,
        name,
    )
    before = [x for x in store.collected("joined", None) if (x["component"], x["name"]) == (TRAINER, name)]
    # In the order of each one's first word: one that is replaced and still lives joins again with every word it says.
    joined = list(dict.fromkeys([row[0] for row in rows] + [each["incarnation"] for each in before]))
    own = request.incarnation
    if own in joined and joined[-1] != own:
        raise Fenced(
            f"this process of trainer {name!r} of {request.policy} was replaced before it resumed: a process that was "
            "replaced cannot resume, start a new one"
        )


def _publish_resumed(ledger: Ledger, now: float, request: m.ResumeRequest, known: Manifest, epoch: int) -> None:
    """Workers follow the newest serial: back to the version resumed at, and to where its files are now."""
    manifest = known if request.manifest is None else request.manifest
    if (manifest.policy, manifest.version, manifest.digest) != (known.policy, known.version, known.digest):
        raise BadRequest(f"the manifest of {manifest.policy} v{manifest.version} is not of the version resumed at")
    newest = ledger.policies.newest[request.policy]
    if (newest.version, newest.digest, newest.files) != (manifest.version, manifest.digest, manifest.files):
        ledger.policies.publish(now, manifest, trainer_epoch=epoch)


def _resumed(ledger: Ledger, policy: str, epoch: int, undone: tuple[int, ...]) -> m.ResumeReply:
    return m.ResumeReply(
        trainer_epoch=epoch, undone=undone, steps=ledger.policies.steps[policy], finished=ledger.trained_out(policy)
    )


def commit(ledger: Ledger, now: float, request: m.CommitRequest) -> m.CommitReply:
    policy = request.policy
    ledger.policies.require_epoch(policy, request.trainer_epoch)
    ledger.trainer_said(now, policy)
    checkpoint_kept(ledger.store, policy, ledger.policies.versions[policy], request.oldest_checkpoint)
    if request.manifest is None:
        if not request.reason:
            raise BadRequest(f"commit of batch {request.batch} of {policy} has neither a manifest nor a reason")
        fresh = ledger.batches.drop(now, policy, request.batch, request.trainer_epoch, request.reason, request.metrics)
        if fresh:
            starve_without_signal(ledger, now, policy, request.reason)
    else:
        fresh = ledger.batches.commit(
            now, policy, request.batch, request.trainer_epoch, request.manifest, request.metrics
        )
        reach("dataflow.in_commit")
        if fresh:
            ledger.groups.sweep(now, policy)
            cancel_hopeless(ledger, now)
            ledger.evals.open_if_due(now)
            ledger.finish_if_done(now)
    return m.CommitReply(
        version=ledger.policies.versions[policy], duplicate=not fresh, finished=ledger.trained_out(policy)
    )


def fail(ledger: Ledger, now: float, request: m.FailRequest) -> m.FailReply:
    ledger.policies.require_epoch(request.policy, request.trainer_epoch)
    failures = ledger.batches.fail(
        now, request.policy, request.batch, request.failures, request.trainer_epoch, request.error
    )
    stop = failures >= ledger.spec.limits.batch_failures
    if stop:
        ledger.stop(
            now,
            "RunFailed",
            f"batch {request.batch} of policy {request.policy} failed its trainer {failures} times, last: "
            f"{request.error}",
        )
    return m.FailReply(failures=failures, stop=stop)


def roll_back(ledger: Ledger, now: float, policy: str, version: int) -> tuple[int, ...]:
    """Operator: back to a version on purpose; its trainer must come back with a checkpoint of it or older."""
    ledger.policies.require(policy, trainable=True)
    if not 0 <= version <= ledger.policies.versions[policy]:
        raise BadRequest(
            f"{policy} is at version {ledger.policies.versions[policy]}, it cannot be rolled back to {version}"
        )
    require_bytes(ledger.store, policy, version, f"policy {policy}")
    manifest = _committed(ledger, policy, version)
    forget_checkpoint(ledger.store, policy)
    gone = ledger.batches.roll_back(now, policy, version)
    ledger.store.run("UPDATE policies SET trainer_epoch = trainer_epoch + 1 WHERE name = ?", (policy,))
    ledger.store.run("DELETE FROM trainers WHERE policy = ?", (policy,))
    ledger.policies.publish(now, manifest)
    ledger.store.event(now, "rolled_back", policy=policy, version=version, batches=list(gone))
    if ledger.state == "finished":
        ledger.store.set("state", "running")
    return gone


def _committed(ledger: Ledger, policy: str, version: int) -> Manifest:
    """The weights of ``version`` in the surviving history."""
    row = ledger.store.one(
        "SELECT p.manifest FROM batches b JOIN publications p ON p.policy = b.policy AND p.serial = b.serial "
        "WHERE b.policy = ? AND b.state = 'committed' AND b.version = ?",
        policy,
        version - 1,
    )
    return decode(row[0], Manifest) if row else ledger.policies.manifest(policy, version)


def operate(ledger: Ledger, now: float, request: m.OperatorRequest) -> None:
    """What ``OperatorRequest`` names, and ``resume`` (a run that failed). Raises BadRequest."""
    if request.action == "stop":
        ledger.stop(now, "RunFailed", request.error or "stopped by the operator")
    elif request.action == "resume":
        ledger.go_on(now)
    elif request.action == "drain" and request.worker is not None:
        if not ledger.components.drain(request.worker):
            raise BadRequest(f"no rollout service {request.worker!r} was ever here")
    elif request.action == "rollback" and request.policy is not None and request.version is not None:
        roll_back(ledger, now, request.policy, request.version)
    elif request.action == "freeze" and request.policy is not None:
        freeze(ledger, now, request.policy)
    elif request.action == "unfreeze" and request.policy is not None:
        unfreeze(ledger, now, request.policy)
    elif request.action == "cast" and request.policy is not None and request.role is not None:
        cast(ledger, now, request.role, request.policy)
    elif request.action == "add" and request.policy is not None and request.source is not None:
        add(ledger, now, request)
    elif request.action == "swap" and request.policy is not None and request.version is not None:
        swap(ledger, now, request.policy, request.source or request.policy, request.version)
    else:
        raise BadRequest(
            f"action {request.action[:40]!r} is not one of stop, resume, drain (worker), rollback (policy, version), "
            "freeze or unfreeze (policy), swap (policy, source, version), cast (policy, role), "
            "add (policy, source, role), or lacks what it needs"
        )
