"""Right calls at the wrong time, over the real server: replayed, out of order, or of another run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astraflow.types import Episode, FailureKind, Outcome, Record
from astraflow.wire import messages as m
from astraflow.wire.calls import CALLS
from astraflow.wire.codec import decode, encode
from tests.conformance.test_dataflow import real_manifest
from tests.hostile.site import HostileSite, undone
from tests.unit.dataflow import rig as rigs


@pytest.fixture(scope="module", autouse=True)
def real_names() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rigs, "manifest", real_manifest)
        yield


@pytest.fixture(scope="module")
def site(real_names: None) -> Iterator[HostileSite]:
    found = HostileSite()
    yield found
    found.close()


IDEMPOTENT = ("hello", "renew", "submit", "hand_back", "resume", "batch", "commit", "manifest", "report", "events")


def test_replayed_calls_change_nothing(site: HostileSite) -> None:
    """Each right call, sent again at once, after all the others, and backwards: answered, and every row as it was."""
    with undone(site.rig):
        order = [name for name in IDEMPOTENT if name != "hand_back"] + ["hand_back"]
        for name in order:
            assert site.call(name, site.good[name]).status == 200, name
            before = site.dump()
            site.check(site.call(name, site.good[name]), before)
            assert site.dump() == before, name
        before = site.dump()
        order.remove("batch")  # after the commit the same call asks for the next one
        for name in [*order, *reversed(order)]:
            answer = site.check(site.call(name, site.good[name]), before)
            assert site.dump() == before, (name, answer.status)
        assert site.check(site.call("fail", site.good["fail"]), before).status == 409
        assert site.call("submit", site.good["submit"]).body == encode(m.SubmitReply(duplicate=True))
        assert decode(site.call("commit", site.good["commit"]).body, m.CommitReply).duplicate
        site.rig.balanced()


def test_a_trainer_that_was_replaced_cannot_come_back(site: HostileSite) -> None:
    """A call of the old process that was held up in the network must not fence the new one."""
    with undone(site.rig):
        newer = msgspec.structs.replace(site.good["resume"], incarnation="t2")
        assert decode(site.call("resume", newer).body, m.ResumeReply).trainer_epoch == 2
        before = site.dump()
        late = site.check(site.call("resume", site.good["resume"]), before)
        assert (late.status, late.error.kind) == (409, "Fenced")
        assert "trainer epoch 1 of p, which 't-p' has replaced" in late.error.message
        for name in ("batch", "commit", "fail"):
            refused = site.check(site.call(name, site.good[name]), before)
            assert (refused.status, refused.error.kind) == (409, "Fenced"), name
            assert "trainer epoch 1 of p was replaced by 2: a newer trainer resumed" in refused.error.message
        assert site.call("resume", newer).status == 200
        assert site.dump() == before


def failed_episode(task_key: str) -> Episode:
    return Episode(task_key=task_key, outcome=Outcome.FAILED, failure=FailureKind.INFRA, error="boom")


small = st.integers(0, 6)
lease_ids = st.builds("{}/{}/{}".format, small, st.integers(0, 2), small)
who = st.sampled_from(["w", "v"])
epochs = st.integers(0, 4)


def some_call(site: HostileSite) -> st.SearchStrategy[tuple[str, Record]]:
    """A well-formed call with ids that may exist, may have existed, or never will."""
    key = site.good["submit"].episode.task_key  # type: ignore[attr-defined]
    newest = site.rig.digest("p")[1]
    held = st.lists(lease_ids, max_size=3).map(tuple)
    calls: dict[str, st.SearchStrategy[Any]] = {
        "lease": st.builds(
            m.LeaseRequest,
            worker=who,
            incarnation=st.just("w"),
            count=small,
            capabilities=st.sampled_from([m.Capabilities(policies=("p",)), m.Capabilities(policies=())]),
        ),
        "renew": st.builds(m.RenewRequest, worker=who, incarnation=st.just("w"), held=held),
        "hand_back": st.builds(m.HandBackRequest, worker=who, held=held),
        "submit": st.builds(
            m.SubmitRequest,
            worker=who,
            group=small,
            index=small,
            attempt=small,
            episode=st.sampled_from([site.good["submit"].episode, failed_episode(key), failed_episode("other")]),  # type: ignore[attr-defined]
        ),
        "resume": st.builds(
            m.ResumeRequest,
            policy=st.sampled_from(["p", "q"]),
            version=small,
            digest=st.sampled_from([newest, real_manifest().digest, real_manifest("p", 2).digest, "f" * 64]),
            trainer=st.just("t-p"),
            incarnation=st.sampled_from(["t", "t2", "t3"]),
        ),
        "batch": st.builds(m.BatchRequest, policy=st.just("p"), trainer_epoch=epochs),
        "commit": st.builds(
            m.CommitRequest,
            policy=st.just("p"),
            batch=small,
            trainer_epoch=epochs,
            manifest=st.one_of(st.none(), small.map(lambda version: real_manifest("p", version))),
            reason=st.sampled_from([None, "no_signal"]),
        ),
        "fail": st.builds(m.FailRequest, policy=st.just("p"), batch=small, trainer_epoch=epochs, error=st.just("boom")),
        "operate": st.builds(
            m.OperatorRequest,
            action=st.sampled_from(["drain", "rollback", "resume", "nothing"]),
            worker=who,
            policy=st.just("p"),
            version=small,
        ),
        "manifest": st.builds(m.ManifestRequest, policy=st.just("p"), version=small),
    }
    return st.sampled_from(sorted(calls)).flatmap(lambda name: calls[name].map(lambda request: (name, request)))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_calls_out_of_order(site: HostileSite, data: Any) -> None:
    """Any order of any calls: no 5xx, a refusal changes nothing, nothing is lost, and the run can still go on."""
    calls = data.draw(st.lists(some_call(site), min_size=3, max_size=14))
    with undone(site.rig):
        for name, request in calls:
            site.check(site.call(name, request), site.dump())
            site.rig.balanced()
        _the_run_goes_on(site)


def _the_run_goes_on(site: HostileSite) -> None:
    """A new trainer and a new worker find their way from wherever it is."""
    rig = site.rig
    site.call("operate", m.OperatorRequest(action="resume"))
    for worker in ("w", "v"):
        rig.db.run(
            "UPDATE episodes SET state = 'pending', worker = NULL WHERE state = 'leased' AND worker = ?", (worker,)
        )
    version, digest = rig.service.ledger.policies.versions["p"], None
    digest = rig.go(rig.flow.manifest(m.ManifestRequest(policy="p", version=version))).digest
    epoch = rig.resume_at("p", version, digest, incarnation="fresh").trainer_epoch
    for _ in range(20):
        reply = rig.batch(epoch)
        if reply.batch is not None:
            assert rig.commit(reply.batch, salt="fresh").version == version + 1
            return
        for lease in rig.lease(8, worker="fresh").leases:
            rig.submit(lease, float(lease.index), worker="fresh")
    raise AssertionError(f"no batch any more: {reply}")


def test_another_runs_ids_and_tokens(site: HostileSite) -> None:
    other = HostileSite(run="another")
    try:
        before = other.dump()
        for name in CALLS:
            answer = other.post(name, encode(site.good[name]), site.token(name))
            assert other.check(answer, before).status == 401, name
        # With a token of this run, as if the wrong URL and the right token had met.
        submit = site.good["submit"]
        for group in range(1, 9):
            for attempt in (1, 2):
                request = msgspec.structs.replace(submit, group=group, attempt=attempt)
                answer = other.check(other.call("submit", request), before)
                assert answer.status >= 400 or decode(answer.body, m.SubmitReply).duplicate, (group, attempt)
                assert other.dump() == before
        resume = msgspec.structs.replace(site.good["resume"], digest="e" * 64, incarnation="stranger")
        assert other.check(other.call("resume", resume), before).status == 400
        for call, field in (
            ("commit", "batch"),
            ("fail", "batch"),
            ("commit", "trainer_epoch"),
            ("batch", "trainer_epoch"),
        ):
            wrong = msgspec.structs.replace(site.good[call], **{field: 77})
            assert other.check(other.call(call, wrong), before).status == 400, (call, field)
        held = tuple(f"{group}/{index}/1" for group in range(1, 9) for index in range(2))
        renew = m.RenewRequest(worker="stranger", incarnation="s", held=held)
        assert decode(other.call("renew", renew).body, m.RenewReply).lost == held
        assert other.call("hand_back", m.HandBackRequest(worker="stranger", held=held)).status == 200
        assert other.rig.states("episodes") == site.rig.states("episodes")
        hello = m.HelloRequest(component="rollout", name="w", incarnation="stranger")
        assert other.check(other.call("hello", hello), other.dump()).status == 409
    finally:
        other.close()
