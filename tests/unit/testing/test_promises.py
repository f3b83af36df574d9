"""An answer that is not on disk is found: held against another connection to the same file."""

from __future__ import annotations

from pathlib import Path

import pytest

from astraflow.testing.simulator.promises import not_on_disk
from astraflow.types import Lease
from astraflow.wire import messages as m
from tests.unit.dataflow.rig import Rig, manifest


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(folder=tmp_path)


def submitted(rig: Rig, lease: Lease) -> m.SubmitRequest:
    return m.SubmitRequest(
        worker="w", group=lease.group, index=lease.index, attempt=lease.attempt, episode=rig.episode(lease)
    )


def missing(rig: Rig, request: object, reply: object) -> str | None:
    return not_on_disk(rig.db.connection, request, reply)


def test_leases_and_results(rig: Rig) -> None:
    with rig:
        request = m.LeaseRequest(worker="w", incarnation="w", count=1, capabilities=m.Capabilities(policies=("p",)))
        reply = rig.go(rig.flow.lease(request))
        (lease,) = reply.leases
        assert missing(rig, request, reply) is None
        said = missing(rig, submitted(rig, lease), m.SubmitReply())
        assert said == f"the result of {lease.group}/{lease.index}/1 was acknowledged, not stored"
        rig.submit(lease)
        assert missing(rig, submitted(rig, lease), m.SubmitReply()) is None
        rig.db.run("UPDATE episodes SET attempt = 0")
        assert missing(rig, request, reply) == f"lease {lease.id} was given, the disk does not have that attempt"


def test_epochs_batches_and_commits(rig: Rig) -> None:
    with rig:
        resume = m.ResumeRequest(policy="p", version=0, digest=manifest().digest, trainer="t-p", incarnation="t")
        reply = rig.go(rig.flow.resume(resume))
        assert missing(rig, resume, reply) is None
        rig.play_groups(2)
        ask = m.BatchRequest(policy="p", trainer_epoch=reply.trainer_epoch)
        given = rig.go(rig.flow.batch(ask))
        assert given.batch is not None and missing(rig, ask, given) is None
        commit = m.CommitRequest(
            policy="p", batch=given.batch.id, trainer_epoch=reply.trainer_epoch, manifest=manifest(version=1)
        )
        said = missing(rig, commit, m.CommitReply(version=1, duplicate=False, finished=False))
        assert said == f"the commit of batch {given.batch.id} was acknowledged, not stored"
        assert missing(rig, commit, rig.go(rig.flow.commit(commit))) is None
        rig.db.run("DELETE FROM events WHERE kind = 'issued'")
        assert missing(rig, ask, given) == f"batch {given.batch.id} was issued, the disk does not have it"
        rig.db.run("UPDATE policies SET trainer_epoch = 0")
        assert missing(rig, resume, reply) == "trainer epoch 1 of p was given, the disk has 0"


def test_what_gives_nothing_promises_nothing(rig: Rig) -> None:
    with rig:
        ask = m.BatchRequest(policy="p", trainer_epoch=1)
        assert missing(rig, ask, m.BatchReply()) is None
        assert missing(rig, m.ManifestRequest(policy="p"), manifest()) is None
