"""Policies that join a run, are trained again, change their role, or are a moving average: each by one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from astraflow.algorithms.pace_rounds import Barrier
from astraflow.dataflow.settings import EvalSpec, PolicySpec, RunSpec
from astraflow.dataflow.verify import verify
from astraflow.errors import BadRequest, NotFound
from astraflow.types import Lease, Manifest
from astraflow.wire import messages as m
from tests.unit.dataflow.rig import Rig, make_spec, manifest, tasks


def spec(*, steps: int = 20, keep_every: int = 0, average: bool = False, **fields: Any) -> RunSpec:
    """Two trained policies and a frozen one, which may be the average of the first."""
    policies = {
        "a": PolicySpec(groups_per_batch=1, max_staleness=2, keep_every=keep_every),
        "b": PolicySpec(groups_per_batch=1, max_staleness=2),
        "old": PolicySpec(trainable=False, average_of="a" if average else ""),
    }
    return make_spec(policies=policies, steps=steps, **fields)


def operate(rig: Rig, action: str, **fields: Any) -> None:
    rig.go(rig.flow.operate(m.OperatorRequest(action=action, **fields)))


def join(rig: Rig, name: str = "new", **fields: Any) -> None:
    operate(rig, "add", **{"policy": name, "source": "a", "role": "role_old", **fields})


def stepped(rig: Rig, policy: str, steps: int) -> int:
    epoch = rig.resume(policy, incarnation=f"t{rig.service.ledger.policies.versions[policy]}")
    for _ in range(steps):
        rig.play_groups(1)
        rig.commit(rig.take(epoch, policy))
    return epoch


def whole(rig: Rig) -> None:
    """Nothing is lost, and the events tell what the tables say."""
    rig.balanced()
    assert not verify(rig.service.ledger.store.connection).differences


def everyone(rig: Rig) -> list[str]:
    return list(rig.service.ledger.policies.specs)


def lease_all(rig: Rig, count: int) -> tuple[Lease, ...]:
    return rig.lease(count, policies=everyone(rig)).leases


# ── joining ──


def test_a_policy_joins_plays_and_is_trained_while_the_others_go_on() -> None:
    with Rig(spec(keep_every=2)) as rig:
        epoch = stepped(rig, "a", 3)
        open_before = lease_all(rig, 2)
        join(rig, version=2)
        newest = rig.lease(0).manifests["new"]
        past = rig.service.ledger.policies.manifest("a", 2)
        assert (newest.version, newest.digest, newest.files) == (0, past.digest, past.files)
        for lease in open_before:  # of a group that was opened for others: it ends as it began
            assert not lease.roles
            rig.submit(lease, float(lease.index))
        (first, second) = lease_all(rig, 2)
        assert first.roles == {"role_a": "a", "role_b": "b", "role_old": "new"}
        rig.submit(first, 0.0)
        rig.submit(second, 1.0)
        own = rig.resume_at("new", 0, newest.digest).trainer_epoch
        batch = rig.take(own, "new")
        assert {int(row.sample_id.split("/")[0]) for row in batch.rows} == {first.group}
        rig.commit(batch)
        rig.commit(rig.take(epoch, "a"))
        assert rig.service.ledger.policies.versions == {"a": 4, "b": 0, "old": 0, "new": 1}
        whole(rig)


def test_what_joined_is_there_after_a_restart_of_dataflow() -> None:
    with Rig(spec()) as rig:
        join(rig)
        rig.play_groups(1)
        rig.restart()
        status = rig.go(rig.flow.status())
        assert [each.policy for each in status.policies] == ["a", "b", "old", "new"]
        assert [(each.name, each.like, each.trainable) for each in status.added] == [("new", "a", True)]
        assert [each.name for each in renewed(rig).added] == ["new"]
        (lease, *_) = lease_all(rig, 2)
        assert lease.roles["role_old"] == "new"
        assert ("new", 0) in {(each.policy, each.version) for each in rig.service.ledger.live_manifests()}
        whole(rig)


def renewed(rig: Rig) -> m.RenewReply:
    return rig.go(rig.flow.renew(m.RenewRequest(worker="w", incarnation="w")))


def test_no_lease_goes_to_a_worker_that_has_not_loaded_it_yet() -> None:
    with Rig(spec()) as rig:
        join(rig)
        assert not rig.lease(2, policies=["a", "b", "old"]).leases
        assert len(rig.lease(2, policies=["a", "b", "new"]).leases) == 2, "who plays nothing need not be served"


def test_the_run_ends_when_what_joined_has_its_steps_too() -> None:
    with Rig(spec(steps=1)) as rig:
        join(rig)
        for name in ("a", "b", "new"):
            assert rig.service.ledger.state == "running"
            rig.play_groups(1) if name == "a" else None
            epoch = rig.resume_at(name, 0, rig.digest(name)[1]).trainer_epoch
            rig.commit(rig.take(epoch, name))
        assert rig.service.ledger.state == "finished"
        whole(rig)


def test_a_frozen_one_joins_without_a_trainer_and_can_be_swapped() -> None:
    with Rig(spec()) as rig:
        join(rig, frozen=True)
        assert rig.service.ledger.policies.trainable == ("a", "b")
        stepped(rig, "b", 1)
        operate(rig, "swap", policy="new", source="b", version=1)
        assert rig.lease(0).manifests["new"].version == 1
        whole(rig)


def test_it_may_begin_with_weights_of_its_own_and_like_one_that_joined_before() -> None:
    with Rig(spec()) as rig:
        join(rig, manifest=manifest("elsewhere", 7, salt="own"))
        made = rig.lease(0).manifests["new"]
        assert (made.policy, made.version, made.digest) == ("new", 0, manifest("elsewhere", 7, salt="own").digest)
        join(rig, "newer", source="new")
        assert {name: each.like for name, each in rig.service.ledger.policies.added.items()} == {
            "new": "a",
            "newer": "a",
        }
        whole(rig)


def test_the_same_call_again_changes_nothing() -> None:
    with Rig(spec()) as rig:
        join(rig)
        serial = rig.lease(0).manifests["new"].serial
        events = rig.db.number("SELECT COUNT(*) FROM events")
        join(rig)
        assert (rig.lease(0).manifests["new"].serial, rig.db.number("SELECT COUNT(*) FROM events")) == (serial, events)


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ({}, {"version": 1}),
        ({"version": 0}, {"version": 1}),
        ({"version": 0}, {"version": 99}),
        ({"version": 0}, {"manifest": manifest("x", salt="own")}),
        ({"manifest": manifest("x", salt="own")}, {"manifest": manifest("x", salt="other")}),
        ({"manifest": manifest("x", salt="own")}, {"version": 0}),
        ({"manifest": manifest("x", salt="own")}, {}),
    ],
)
def test_one_of_that_name_with_other_weights_does_not_pass_for_it(first: dict[str, Any], again: dict[str, Any]) -> None:
    with Rig(spec(keep_every=1)) as rig:
        join(rig, **first)
        stepped(rig, "a", 2)
        join(rig, **first)
        serial = rig.lease(0).manifests["new"].serial
        with pytest.raises(BadRequest, match="a policy 'new' in this run already, which began with other weights"):
            join(rig, **again)
        assert rig.lease(0).manifests["new"].serial == serial


def test_an_evaluation_is_played_by_whom_the_groups_of_its_time_are() -> None:
    evals = EvalSpec(tasks=tasks(2, name="held"), count=1, every=1)
    with Rig(spec(evals=evals)) as rig:
        rig.submit(lease_all(rig, 1)[0], 1.0)  # of version 0
        join(rig)
        epoch = rig.resume("a")
        rig.play_groups(1)
        rig.commit(rig.take(epoch, "a"))
        (lease,) = [each for each in lease_all(rig, 4) if each.purpose == "eval"]
        assert lease.roles["role_old"] == "new" and lease.versions["new"] == 0
        rig.submit(lease, 1.0)
        rig.balanced()


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"role": "nobody"}, BadRequest, r"no role 'nobody' in this run; known: \['role_a', 'role_b', 'role_old'\]"),
        ({"role": None}, BadRequest, "no role None"),
        ({"policy": "b"}, BadRequest, "a policy 'b' in this run already"),
        ({"policy": "../x"}, BadRequest, "policy must match"),
        ({"source": "c"}, BadRequest, "no policy 'c'"),
        ({"version": 9}, NotFound, "version 9 of a was never published"),
        ({"source": None}, BadRequest, r"add \(policy, source, role\), or lacks"),
        ({"source": "old", "decay": 0.5}, BadRequest, "old is not trained in this run: there is nothing to average"),
        ({"decay": 1.0}, BadRequest, r"must be in \(0, 1\), found 1.0"),
        ({"manifest": manifest("x")}, BadRequest, "the weights have 999 bytes and those of a 1"),
    ],
)
def test_what_cannot_join_is_refused_and_changes_nothing(
    fields: dict[str, Any], error: type[Exception], words: str
) -> None:
    if fields.get("manifest") is not None:
        large = [msgspec.structs.replace(file, size_bytes=999) for file in fields["manifest"].files]
        fields = {"manifest": msgspec.structs.replace(fields["manifest"], files=tuple(large))}
    with Rig(spec()) as rig:
        with pytest.raises(error, match=words):
            join(rig, **fields)
        assert everyone(rig) == ["a", "b", "old"] and not rig.service.ledger.policies.cast
        whole(rig)


def test_nobody_who_begins_at_0_joins_those_who_step_together() -> None:
    with Rig(spec(pace=Barrier())) as rig:
        with pytest.raises(BadRequest, match="under Barrier all policies step together"):
            join(rig)
        join(rig, frozen=True)


# ── of another architecture ──


def unlike(*, form: str = "", size: int = 1, **fields: Any) -> Manifest:
    """Version 5 of b, as if b's model were another one."""
    made = manifest("b", 5, salt="other", form=form)
    files = tuple(msgspec.structs.replace(file, size_bytes=size) for file in made.files)
    return msgspec.structs.replace(made, files=files, **fields)


def told(rig: Rig, policy: str, form: str) -> None:
    """Its newest weights say of what form they are."""
    newest = rig.service.ledger.policies.newest[policy]
    rig.service.ledger.policies.publish(0.0, msgspec.structs.replace(newest, form=form))


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    ("own", "other", "words"),
    [
        ("1" * 64, unlike(form="2" * 64), "the weights are of another model than those of {0}: their tensors"),
        ("", unlike(size=999), "the weights have 999 bytes and those of {0} 1"),
        ("", unlike(size=999, files_digest="3" * 64), "the weights have 999 bytes and those of {0} 1"),
    ],
)
def test_nobody_is_swapped_to_weights_of_another_model(own: str, other: Manifest, words: str, joined: bool) -> None:
    with Rig(spec()) as rig:
        told(rig, "a", own)
        told(rig, "old", own)
        if joined:
            join(rig, frozen=True)
        name = "new" if joined else "old"
        rig.service.ledger.policies.publish(0.0, other)
        before = rig.lease(0).manifests[name]
        with pytest.raises(BadRequest, match=words.format(name)):
            operate(rig, "swap", policy=name, source="b", version=5)
        assert rig.lease(0).manifests[name] == before


def test_one_of_another_dtype_may_play_but_none_of_another_form_joins() -> None:
    with Rig(spec()) as rig:
        told(rig, "a", "1" * 64)
        join(rig, frozen=True, manifest=unlike(form="1" * 64, size=2))
        with pytest.raises(BadRequest, match="the weights are of another model than those of a: "):
            join(rig, "newer", manifest=unlike(form="2" * 64))


# ── roles ──


def test_who_plays_nothing_more_is_frozen_and_trained_again_once_it_does() -> None:
    with Rig(spec()) as rig:
        stepped(rig, "b", 1)
        operate(rig, "cast", role="role_b", policy="a")
        assert rig.service.ledger.policies.steps["b"] == 1, "it has ended"
        with pytest.raises(BadRequest, match="b plays no role now"):
            operate(rig, "unfreeze", policy="b")
        operate(rig, "cast", role="role_b", policy="b")
        operate(rig, "unfreeze", policy="b")
        operate(rig, "unfreeze", policy="b")
        assert rig.service.ledger.policies.steps["b"] == 20
        assert not rig.service.ledger.policies.cast, "it is as the recipe says again"
        stepped(rig, "b", 1)
        assert rig.service.ledger.policies.versions["b"] == 2
        whole(rig)


def test_a_status_says_who_is_frozen_and_who_has_merely_all_its_steps() -> None:
    def frozen(rig: Rig) -> list[str]:
        return [each.policy for each in rig.go(rig.flow.status()).policies if each.frozen]

    with Rig(spec(steps=1)) as rig:
        stepped(rig, "a", 1)
        operate(rig, "cast", role="role_a", policy="old")  # a has ended by itself
        operate(rig, "cast", role="role_b", policy="old")
        assert frozen(rig) == ["b"]
    with Rig(spec()) as rig:
        operate(rig, "cast", role="role_b", policy="a")
        operate(rig, "cast", role="role_b", policy="b")
        assert frozen(rig) == ["b"], "to play again is not to be trained again"
        operate(rig, "unfreeze", policy="b")
        assert not frozen(rig)


def test_a_role_that_nobody_has_cannot_be_given() -> None:
    with Rig(spec()) as rig:
        for fields, words in (
            ({"role": "x", "policy": "a"}, "no role 'x'"),
            ({"role": "role_a", "policy": "x"}, "no policy 'x'"),
        ):
            with pytest.raises(BadRequest, match=words):
                operate(rig, "cast", **fields)


# ── trained again ──


def test_an_unfrozen_policy_goes_on_to_its_end_after_a_restart_too() -> None:
    with Rig(spec(steps=3)) as rig:
        stepped(rig, "a", 1)
        operate(rig, "freeze", policy="a")
        assert rig.resume_at("a", 1, rig.digest("a")[1], incarnation="again").finished
        operate(rig, "unfreeze", policy="a")
        rig.restart()
        assert not rig.resume_at("a", 1, rig.digest("a")[1], incarnation="more").finished
        stepped(rig, "a", 2)
        assert rig.service.ledger.policies.versions["a"] == 3
        whole(rig)


def test_what_was_never_trained_or_is_over_is_not_trained_again() -> None:
    with Rig(spec()) as rig:
        with pytest.raises(BadRequest, match="no trainable policy 'old'"):
            operate(rig, "unfreeze", policy="old")
        for name in "ab":
            operate(rig, "freeze", policy=name)
        with pytest.raises(BadRequest, match="the run has finished"):
            operate(rig, "unfreeze", policy="a")


# ── moving average ──


def published(rig: Rig, version: int, policy: str = "old", of: int = 1) -> m.PublishReply:
    made = manifest(policy, version, salt="mean")
    return rig.go(rig.flow.publish(m.PublishRequest(policy=policy, manifest=made, of_version=of)))


@pytest.mark.parametrize("begin", [lambda rig: None, lambda rig: join(rig, "mean", decay=0.5)])
def test_a_moving_average_has_versions_of_its_own(begin: Callable[[Rig], None]) -> None:
    with Rig(spec(average=True)) as rig:
        begin(rig)
        name = "mean" if "mean" in everyone(rig) else "old"
        reply = published(rig, 5, name)
        assert (rig.lease(0).manifests[name].version, reply.finished) == (1, False)
        assert published(rig, 5, name).serial == reply.serial, "the same weights are the same version"
        assert published(rig, 6, name, of=2).serial == reply.serial + 1
        assert rig.lease(0).manifests[name].version == 2
        with pytest.raises(BadRequest, match=f"{name} is the moving average of a"):
            operate(rig, "swap", policy=name, source="a", version=0)
        stepped(rig, "a", 1)
        whole(rig)
        for trained in "ab":
            operate(rig, "freeze", policy=trained)
        assert published(rig, 7, name).finished


@pytest.mark.parametrize("policy", ["a", "b"])
def test_only_an_average_is_published_without_a_step(policy: str) -> None:
    with Rig(spec(average=True)) as rig:
        with pytest.raises(BadRequest, match=f"{policy} is no moving average of this run"):
            published(rig, 1, policy)
        with pytest.raises(BadRequest, match="no policy 'x'"):
            published(rig, 1, "x")
