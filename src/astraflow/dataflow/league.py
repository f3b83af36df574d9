"""Policies change their part while the run goes on: one joins, one is trained no more, or again, another plays with a
past version or in another role.

An operator's calls, each one transition. Workers follow the newest publication of every policy and hear with their
next heartbeat of one that joined; a group is played to its end by whom it was opened for. Nobody waits for any of it.
"""

from __future__ import annotations

import msgspec

from astraflow.algorithms.base import StepPace
from astraflow.dataflow.ledger import Ledger
from astraflow.errors import BadRequest
from astraflow.types import Manifest
from astraflow.wire import messages as m
from astraflow.wire.names import require_name


def freeze(ledger: Ledger, now: float, policy: str) -> None:
    """It ends at the version that it has; its trainer is told that it is finished, others go on. Again is fine.

    A step that is being made when the call comes is still committed.
    """
    ledger.policies.require(policy, trainable=True)
    if ledger.trained_out(policy):
        return
    ledger.policies.freeze(now, policy)
    ledger.evals.open_if_due(now)
    ledger.finish_if_done(now)


def unfreeze(ledger: Ledger, now: float, policy: str) -> None:
    """It is trained again, to the end that the recipe names. Again is fine. Raises BadRequest."""
    policies = ledger.policies
    policies.require(policy, trainable=True)
    if ledger.state == "finished":
        raise BadRequest(f"the run has finished: {policy} cannot be trained on in it")
    if policy not in policies.roles.values():
        raise BadRequest(
            f"{policy} plays no role now, so that nothing would come for it to be trained on: cast it first"
        )
    if policies.is_frozen(policy):
        policies.unfreeze(now, policy)
        ledger.store.run("UPDATE policies SET no_signal = 0, barren = 0 WHERE name = ?", (policy,))


def swap(ledger: Ledger, now: float, policy: str, source: str, version: int) -> Manifest:
    """From now on the frozen ``policy`` plays with what ``version`` of ``source`` was. Raises BadRequest, NotFound.

    It is a version of its own: spans and evaluations tell which weights played.
    """
    policies = ledger.policies
    policies.require(policy)
    if policy in policies.trainable:
        raise BadRequest(
            f"{policy} is trained in this run: its next step would undo a swap; swap a policy with trainable=False, "
            "or roll this one back"
        )
    if average := policies.specs[policy].average_of:
        raise BadRequest(f"{policy} is the moving average of {average}: its next version would undo a swap")
    wanted = _kept(ledger, source, version)
    newest = policies.newest[policy]
    _require_alike(wanted, newest)
    if (newest.digest, newest.files) == (wanted.digest, wanted.files):
        return newest
    made = policies.publish(
        now, msgspec.structs.replace(wanted, policy=policy, version=newest.version + 1, trainer_epoch=0)
    )
    ledger.store.event(now, "swapped", policy=policy, version=made.version, source=source, source_version=version)
    return made


def cast(ledger: Ledger, now: float, role: str, policy: str) -> None:
    """In every group that is opened from now on ``policy`` plays ``role``. Raises BadRequest.

    Whoever played it and plays nothing more is frozen: it would wait for ever for something to be trained on.
    """
    policies = ledger.policies
    policies.require(policy)
    before = policies.roles.get(role)
    if before is None:
        raise BadRequest(f"no role {role[:40]!r} in this run; known: {sorted(policies.roles)}")
    if before == policy:
        return
    policies.recast(now, role, policy)
    if before in policies.trainable and before not in policies.roles.values():
        freeze(ledger, now, before)


def add(ledger: Ledger, now: float, request: m.OperatorRequest) -> None:
    """A policy more, which plays ``role`` from now on; the same again is fine. Raises BadRequest, NotFound.

    Its version 0 is a version of ``source`` (None: the newest), or the weights of ``manifest``.
    """
    policies, name, source = ledger.policies, request.policy or "", request.source or ""
    policies.require(source)
    if request.role is None or request.role not in policies.roles:
        raise BadRequest(f"no role {request.role!r} in this run; known: {sorted(policies.roles)}")
    like = policies.added[source].like if source in policies.added else source
    wanted = m.AddedPolicy(
        name=require_name(name, "policy"),
        like=like,
        trainable=not (request.frozen or request.decay is not None),
        average_of="" if request.decay is None else source,
        decay=request.decay or 0.0,
    )
    _require_new(ledger, wanted)
    if name in policies.specs:
        _require_same(ledger, request)
    else:
        initial = request.manifest
        if initial is None:
            newest = policies.newest[source].version
            initial = _kept(ledger, source, newest if request.version is None else request.version)
        _require_alike(initial, policies.newest[like])
        serial = policies.newest[like].serial  # begins with the time of day, as every other policy's
        fresh = msgspec.structs.replace(initial, policy=name, version=0, trainer_epoch=0, serial=serial)
        policies.join(now, wanted, fresh)
    cast(ledger, now, request.role, name)


def _require_new(ledger: Ledger, wanted: m.AddedPolicy) -> None:
    known = ledger.policies.added.get(wanted.name)
    if known is not None and msgspec.structs.replace(known, since=0) == wanted:
        return
    if wanted.name in ledger.policies.specs:
        raise BadRequest(f"there is a policy {wanted.name!r} in this run already: choose another name")
    pace = ledger.spec.pipeline.pace
    if wanted.trainable and isinstance(pace, StepPace):
        raise BadRequest(
            f"under {type(pace).__name__} all policies step together, and {wanted.name} would begin at version 0: "
            "add it with --frozen, or run without a schedule"
        )
    average = wanted.average_of
    if average and average not in ledger.policies.trainable:
        raise BadRequest(f"{average} is not trained in this run: there is nothing to average")
    if average and not 0 < wanted.decay < 1:
        raise BadRequest(f"the decay of a moving average must be in (0, 1), found {wanted.decay}")


def _require_same(ledger: Ledger, request: m.OperatorRequest) -> None:
    """Who has joined is asked for again: with the weights that it began with. Where no version is named, with some of
    ``source``: what was its newest then is not any more."""
    name, manifest = request.policy or "", request.manifest
    own = ledger.policies.manifest(name, 0).digest
    began = [v for policy, v, digest in ledger.policies.published if (policy, digest) == (request.source, own)]
    same = manifest.digest == own if manifest else request.version in began or (request.version is None and began)
    if not same:
        raise BadRequest(
            f"there is a policy {name!r} in this run already, which began with other weights: choose another name"
        )


def _require_alike(initial: Manifest, like: Manifest) -> None:
    """Nobody who plays ``like`` could load weights of another architecture. By size where a form is not told."""
    if initial.form and like.form:
        if initial.form != like.form:
            raise BadRequest(
                f"the weights are of another model than those of {like.policy}: their tensors have other names or "
                "shapes, nobody could load them; name weights of the same architecture"
            )
        return
    found, expected = (sum(file.size_bytes for file in each.files) for each in (initial, like))
    if initial.base_digest is None and like.base_digest is None and abs(found - expected) > expected // 8:
        raise BadRequest(
            f"the weights have {found} bytes and those of {like.policy} {expected}: they are of another model"
        )


def _kept(ledger: Ledger, source: str, version: int) -> Manifest:
    """Where a past version can be read. Raises BadRequest if its files may be gone, NotFound if it never was."""
    wanted = ledger.policies.manifest(source, version)
    held = {(each.policy, each.version) for each in ledger.live_manifests()} | {(source, 0)}  # that one always stays
    if (source, version) not in held:
        there = sorted(v for name, v in held if name == source)
        raise BadRequest(
            f"the weights of {source} version {version} are not kept; kept are {there}: Policy.keep_every keeps more"
        )
    return wanted


def publish_average(ledger: Ledger, now: float, request: m.PublishRequest) -> m.PublishReply:
    """The next version of a moving average; the same weights again change nothing. Raises BadRequest."""
    policies, policy = ledger.policies, request.policy
    policies.require(policy)
    source = policies.specs[policy].average_of
    if not source or request.manifest.policy != policy:
        raise BadRequest(f"{policy} is no moving average of this run: its versions come by commit")
    newest = policies.newest[policy]
    if newest.digest != request.manifest.digest:
        made = msgspec.structs.replace(request.manifest, version=newest.version + 1, trainer_epoch=0)
        newest = policies.publish(now, made)
        ledger.store.event(
            now, "averaged", policy=policy, version=made.version, source=source, source_version=request.of_version
        )
    return m.PublishReply(serial=newest.serial, finished=ledger.state != "running")
