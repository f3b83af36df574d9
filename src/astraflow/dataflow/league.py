"""Policies change their part while the run goes on: one is trained no more, another plays with a past version.

An operator's calls, each one transition. A frozen policy keeps its versions and plays with the last one; who plays a
frozen role follows the newest publication, as for every other policy, so that nothing else need know of a swap.
"""

from __future__ import annotations

import msgspec

from astraflow.dataflow.ledger import Ledger
from astraflow.errors import BadRequest
from astraflow.types import Manifest


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


def swap(ledger: Ledger, now: float, policy: str, source: str, version: int) -> Manifest:
    """From now on the frozen ``policy`` plays with what ``version`` of ``source`` was. Raises BadRequest, NotFound.

    It is a version of its own: spans and evaluations tell which weights played.
    """
    policies = ledger.policies
    policies.require(policy)
    if policy in ledger.spec.trainable:
        raise BadRequest(
            f"{policy} is trained in this run: its next step would undo a swap; swap a policy with trainable=False, "
            "or roll this one back"
        )
    wanted = policies.manifest(source, version)
    held = {(each.policy, each.version) for each in ledger.live_manifests()} | {(source, 0)}  # that one always stays
    if (source, version) not in held:
        there = sorted(v for name, v in held if name == source)
        raise BadRequest(
            f"the weights of {source} version {version} are not kept; kept are {there}: Policy.keep_every keeps more"
        )
    newest = policies.newest[policy]
    if (newest.digest, newest.files) == (wanted.digest, wanted.files):
        return newest
    made = policies.publish(
        now, msgspec.structs.replace(wanted, policy=policy, version=newest.version + 1, trainer_epoch=0)
    )
    ledger.store.event(now, "swapped", policy=policy, version=made.version, source=source, source_version=version)
    return made
