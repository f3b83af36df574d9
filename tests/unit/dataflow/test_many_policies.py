"""Several policies in one run: no barrier unless Pace says so, ends of their own, freezing and swapping by one call."""

from __future__ import annotations

from typing import Any

import pytest

from astraflow.algorithms.pace_rounds import Barrier, Sync
from astraflow.dataflow.settings import PolicySpec, RunSpec
from astraflow.dataflow.verify import verify
from astraflow.errors import BadRequest, ConfigError, NotFound
from astraflow.types import Manifest
from astraflow.wire import messages as m
from tests.unit.dataflow.rig import Rig, make_spec


def two(*, a: int = 1, b: int = 1, steps: int = 20, frozen: bool = False, **fields: Any) -> RunSpec:
    """Policies ``a`` and ``b`` with so many groups per batch, perhaps a frozen one beside them."""
    own = {name: fields.pop(name) for name in ("spec_a", "spec_b") if name in fields}
    policies = {
        "a": PolicySpec(groups_per_batch=a, max_staleness=2, **own.get("spec_a", {})),
        "b": PolicySpec(groups_per_batch=b, max_staleness=2, **own.get("spec_b", {})),
    }
    if frozen:
        policies["old"] = PolicySpec(trainable=False)
    return make_spec(policies=policies, steps=steps, **fields)


def versions(rig: Rig) -> dict[str, int]:
    return dict(rig.service.ledger.policies.versions)


def operate(rig: Rig, action: str, **fields: Any) -> None:
    rig.go(rig.flow.operate(m.OperatorRequest(action=action, **fields)))


# ── no barrier ──


def test_guarantee_policies_at_one_to_five_steps_never_wait_for_each_other() -> None:
    """Five groups feed five steps of one policy and one of the other; each finds its batch without the other's step."""
    with Rig(two(a=1, b=5, steps=100)) as rig:
        epochs = {name: rig.resume(name) for name in "ab"}
        for number in range(1, 4):
            for _ in range(5):
                rig.play_groups(1)
                rig.commit(rig.take(epochs["a"], "a"))
            assert versions(rig) == {"a": 5 * number, "b": number - 1}
            rig.commit(rig.take(epochs["b"], "b"))
        assert versions(rig) == {"a": 15, "b": 3}
        rig.balanced()


def test_a_policy_whose_trainer_is_gone_holds_nobody_up() -> None:
    with Rig(two(steps=100)) as rig:
        epoch = rig.resume("a")
        for number in range(8):
            rig.play_groups(1)
            rig.commit(rig.take(epoch, "a"))
            assert versions(rig) == {"a": number + 1, "b": 0}
        assert rig.db.number("SELECT COUNT(*) FROM group_policy WHERE policy = 'b' AND reason = 'surplus'") > 0
        rig.balanced()


# ── Pace of steps ──


def test_under_a_barrier_who_is_ahead_waits_and_says_for_whom() -> None:
    with Rig(two(pace=Barrier())) as rig:
        epochs = {name: rig.resume(name) for name in "ab"}
        rig.play_groups(3)
        rig.commit(rig.take(epochs["a"], "a"))
        held = rig.batch(epochs["a"], "a")
        assert held.batch is None and "Barrier holds it back for the other policies; 2/1 groups kept" in held.why
        rig.commit(rig.take(epochs["b"], "b"))
        assert rig.take(epochs["a"], "a").version == 1
        rig.balanced()


def test_sync_trains_when_every_batch_is_there_and_admits_when_every_step_is_done() -> None:
    with Rig(two(a=1, b=2, pace=Sync())) as rig:
        epochs = {name: rig.resume(name) for name in "ab"}
        rig.play_groups(1)
        assert "Sync holds it back" in rig.batch(epochs["a"], "a").why
        rig.play_groups(1)
        assert not rig.lease(8).leases, "the round is whole: nothing more is generated"
        batches = {name: rig.take(epochs[name], name) for name in "ab"}
        for batch in batches.values():
            assert not rig.lease(8).leases, "nothing is generated while somebody trains"
            rig.commit(batch)
        assert len(rig.lease(8).leases) == 4
        assert versions(rig) == {"a": 1, "b": 1}
        rig.balanced()


# ── ends ──


def test_every_policy_ends_at_its_own_step_and_the_run_with_the_last() -> None:
    with Rig(two(spec_b={"steps": 3}, steps=1)) as rig:
        epochs = {name: rig.resume(name) for name in "ab"}
        rig.play_groups(1)
        assert rig.go(rig.flow.commit(_commit(rig, epochs["a"], "a"))).finished
        assert rig.batch(epochs["a"], "a").finished
        for _ in range(3):
            assert rig.service.ledger.state == "running"
            rig.commit(rig.take(epochs["b"], "b"))
            if versions(rig)["b"] < 3:
                rig.play_groups(1)
        assert (versions(rig), rig.service.ledger.state) == ({"a": 1, "b": 3}, "finished")
        rig.balanced()


def _commit(rig: Rig, epoch: int, policy: str) -> m.CommitRequest:
    batch = rig.take(epoch, policy)
    made = Manifest(policy=policy, version=batch.version + 1, digest="x" * 64, files=())
    return m.CommitRequest(policy=policy, batch=batch.id, trainer_epoch=epoch, manifest=made)


@pytest.mark.parametrize(("name", "value"), [("steps", -1), ("keep_every", -1)])
def test_settings_out_of_range_are_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"PolicySpec.{name} must be at least 0, found -1"):
        PolicySpec(**{name: value})


# ── freeze ──


def test_a_frozen_policy_plays_on_with_its_version_and_others_go_on() -> None:
    with Rig(two(steps=3)) as rig:
        epochs = {name: rig.resume(name) for name in "ab"}
        rig.play_groups(1)
        for name in "ab":
            rig.commit(rig.take(epochs[name], name))
        operate(rig, "freeze", policy="b")
        operate(rig, "freeze", policy="b")
        assert rig.batch(epochs["b"], "b").finished
        rig.play_groups(1)
        rig.commit(rig.take(epochs["a"], "a"))
        rig.restart()
        assert rig.resume_at("b", 1, rig.digest("b")[1], incarnation="t2").finished, "it stays frozen after a restart"
        epoch = rig.resume("a", incarnation="t2")
        rig.play_groups(1)
        rig.commit(rig.take(epoch, "a"))
        assert (versions(rig), rig.service.ledger.state) == ({"a": 3, "b": 1}, "finished")
        (status,) = [each for each in rig.go(rig.flow.status()).policies if each.policy == "b"]
        assert (status.version, status.steps) == (1, 1)
        rig.balanced()
        assert not verify(rig.service.ledger.store.connection).differences


def test_a_step_that_is_being_made_when_it_is_frozen_is_committed() -> None:
    with Rig(two(steps=3)) as rig:
        epoch = rig.resume("b")
        rig.play_groups(1)
        batch = rig.take(epoch, "b")
        operate(rig, "freeze", policy="b")
        assert rig.commit(batch).finished
        assert versions(rig)["b"] == 1
        rig.balanced()


def test_freezing_the_last_one_ends_the_run() -> None:
    with Rig(two(steps=3)) as rig:
        operate(rig, "freeze", policy="a")
        assert rig.service.ledger.state == "running"
        operate(rig, "freeze", policy="b")
        assert rig.service.ledger.state == "finished"


# ── swap ──


def stepped(rig: Rig, steps: int, policy: str = "a") -> int:
    epoch = rig.resume(policy)
    for _ in range(steps):
        rig.play_groups(1)
        rig.commit(rig.take(epoch, policy))
    return epoch


def test_a_frozen_policy_plays_with_a_past_version_of_another() -> None:
    with Rig(two(frozen=True, spec_a={"keep_every": 2})) as rig:
        stepped(rig, 5)
        operate(rig, "swap", policy="old", source="a", version=2)
        newest = rig.lease(0).manifests["old"]
        past = rig.service.ledger.policies.manifest("a", 2)
        assert (newest.version, newest.digest, newest.files) == (1, past.digest, past.files)
        operate(rig, "swap", policy="old", source="a", version=2)
        assert rig.lease(0).manifests["old"].serial == newest.serial, "the same again changes nothing"
        operate(rig, "swap", policy="old", source="b", version=0)
        operate(rig, "swap", policy="old", source="a", version=4)
        assert rig.lease(0).manifests["old"].version == 3
        rig.play_groups(1)  # spans of the swapped weights are known
        (status,) = [each for each in rig.go(rig.flow.status()).policies if each.policy == "old"]
        assert (status.version, status.trainable) == (3, False)
        rig.balanced()
        assert not verify(rig.service.ledger.store.connection).differences
        rig.restart()
        assert rig.lease(0).manifests["old"].digest == rig.service.ledger.policies.manifest("a", 4).digest


def test_every_so_many_versions_one_is_kept_in_the_store() -> None:
    with Rig(two(spec_a={"keep_every": 2})) as rig:
        stepped(rig, 5)
        live = {(each.policy, each.version) for each in rig.service.ledger.live_manifests()}
        assert {version for name, version in live if name == "a"} == {0, 2, 4, 5}
        assert {version for name, version in live if name == "b"} == {0}


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"policy": "a", "source": "b", "version": 0}, BadRequest, "a is trained in this run"),
        (
            {"policy": "old", "source": "a", "version": 1},
            BadRequest,
            r"not kept; kept are \[0, 4, 5\]: Policy.keep_eve",
        ),
        ({"policy": "old", "source": "a", "version": 9}, NotFound, "version 9 of a was never published"),
        ({"policy": "old", "source": "c", "version": 0}, BadRequest, "no policy 'c'"),
        ({"policy": "c", "version": 0}, BadRequest, "no policy 'c'"),
        ({"policy": "old"}, BadRequest, r"swap \(policy, source, version\), .* or lacks"),
    ],
)
def test_what_cannot_be_swapped_is_refused_and_changes_nothing(
    fields: dict[str, Any], error: type[Exception], words: str
) -> None:
    with Rig(two(frozen=True, spec_a={"keep_every": 4})) as rig:
        stepped(rig, 5)
        before = rig.lease(0).manifests["old"]
        with pytest.raises(error, match=words):
            operate(rig, "swap", **fields)
        assert rig.lease(0).manifests["old"] == before


def test_only_what_is_trained_can_be_frozen() -> None:
    with Rig(two(frozen=True)) as rig:
        for policy in ("old", "c"):
            with pytest.raises(BadRequest, match=f"no trainable policy '{policy}'"):
                operate(rig, "freeze", policy=policy)


# ── workers that serve some policies only ──


def heard(rig: Rig, worker: str, *, serves: dict[str, int], endpoint: str = "", doing: str = "plays") -> m.RenewReply:
    report = m.ComponentReport(doing=doing, versions=serves, endpoint=endpoint)
    return rig.go(rig.flow.renew(m.RenewRequest(worker=worker, incarnation=worker, report=report)))


def test_workers_hear_where_others_serve_what_they_do_not() -> None:
    with Rig(two()) as rig:
        assert heard(rig, "w1", serves={"a": 0}, endpoint="http://10.0.0.1:7001").endpoints == {}
        assert heard(rig, "w2", serves={"b": 0}).endpoints == {"a": ("http://10.0.0.1:7001",)}
        heard(rig, "w3", serves={"a": 0, "b": 0}, endpoint="http://[::1]:7003")
        found = heard(rig, "w2", serves={"b": 0}).endpoints
        assert found == {"a": ("http://10.0.0.1:7001", "http://[::1]:7003"), "b": ("http://[::1]:7003",)}
        heard(rig, "w3", serves={"a": 0, "b": 0}, endpoint="http://[::1]:7003", doing="quarantined")
        assert heard(rig, "w2", serves={"b": 0}).endpoints == {"a": ("http://10.0.0.1:7001",)}
        rig.advance(60)
        assert heard(rig, "w2", serves={"b": 0}).endpoints == {}, "the dead serve nobody"


@pytest.mark.parametrize(
    "url", ["ftp://h:1", "http://h", "http://h:1/x", "http://u@h:1", "http://h:1?x", "h:1", "http://h:1 http://i:2"]
)
def test_what_is_no_plain_url_is_told_to_nobody(url: str) -> None:
    with Rig(two()) as rig:
        heard(rig, "w1", serves={"a": 0}, endpoint=url)
        assert heard(rig, "w2", serves={"b": 0}).endpoints == {}


def test_a_lease_goes_only_to_who_can_play_every_policy_of_the_workflow() -> None:
    with Rig(two()) as rig:
        refused = rig.lease(2, policies=["a"])
        assert not refused.leases
        assert len(rig.lease(2, policies=["a", "b"]).leases) == 2
