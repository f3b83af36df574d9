"""The protocol ``Dataflow``: the same scenarios by direct call and over HTTP, on the real service."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from astraflow.dataflow.local import LocalDataflow
from astraflow.errors import BadRequest, Fenced, NotFound, UnknownLease, UnknownVersion, VersionConflict
from astraflow.types import Manifest, WeightFile
from astraflow.wire import messages as m
from astraflow.wire.calls import CALLS, Role
from astraflow.wire.client import HttpDataflow
from astraflow.wire.codec import encode
from astraflow.wire.server import Server
from astraflow.wire.tokens import Tokens
from tests.unit.dataflow import rig as rigs
from tests.unit.dataflow.rig import Rig, make_spec


def real_manifest(policy: str = "p", version: int = 0, *, salt: str = "") -> Manifest:
    digest = hashlib.sha256(f"{policy}-{version}-{salt}".encode()).hexdigest()
    file = WeightFile(name="w", sha256=digest, size_bytes=1)
    return Manifest(policy=policy, version=version, digest=digest, files=(file,))


class ByRole:
    """One process of each role behind one protocol: each call goes out with the token that may make it."""

    def __init__(self, url: str, tokens: Tokens) -> None:
        self.clients = {role: HttpDataflow(url, tokens.of(role, "p"), retry_s=5.0, attempts=2) for role in Role}

    def __getattr__(self, name: str) -> Any:
        role = Role.OPERATOR if name == "status" else sorted(CALLS[name].roles)[0]
        return getattr(self.clients[role], name)


class Site:
    """A rig whose hands reach the service directly or over a socket."""

    def __init__(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rigs, "manifest", real_manifest)
        self.rig = Rig(make_spec(steps=2))
        self.flow: Any = LocalDataflow(self.rig.service)
        self.server: Server | None = None
        if kind == "http":
            tokens = Tokens.make(["p"])
            self.server = Server(self.flow, None, tokens=tokens, close_s=1.0)
            self.rig.go(self.server.start())
            self.flow = ByRole(self.server.url, tokens)
        monkeypatch.setattr(Rig, "flow", property(lambda _: self.flow))

    def close(self) -> None:
        if self.server is not None:
            for client in self.flow.clients.values():
                self.rig.go(client.close())
            self.rig.go(self.server.close())
        self.rig.close()


@pytest.fixture(params=["local", "http"])
def site(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    found = Site(request.param, monkeypatch)
    yield found
    found.close()


def test_a_run_to_its_end(site: Site) -> None:
    rig = site.rig
    hello = m.HelloRequest(component="rollout", name="w", incarnation="w")
    assert rig.go(site.flow.hello(hello)).run == "r"
    epoch = rig.resume()
    for _ in range(2):
        rig.step(epoch)
        rig.balanced()
    assert rig.lease().finished and rig.batch(epoch).finished
    status = rig.go(site.flow.status())
    assert (status.state, status.policies[0].version) == ("finished", 2)
    events = rig.go(site.flow.events(m.EventsRequest(limit=5))).events
    assert len(events) == 5 and [e.id for e in events] == sorted(e.id for e in events)


def test_duplicates_are_acknowledged(site: Site) -> None:
    rig = site.rig
    epoch = rig.resume()
    (lease,) = rig.leases()
    assert not rig.submit(lease).duplicate
    assert rig.submit(lease).duplicate
    rig.play_groups(1)
    (other,) = rig.leases()
    rig.submit(other, 0.0)
    batch = rig.take(epoch)
    assert rig.commit(batch).version == 1
    again = rig.commit(batch)
    assert again.duplicate and again.version == 1
    rig.balanced()


def test_guarantee_batch_reissued_identical(site: Site) -> None:
    rig = site.rig
    epoch = rig.resume()
    rig.play_groups(2)
    first = rig.take(epoch)
    assert encode(rig.take(epoch)) == encode(first)
    newer = rig.resume(incarnation="t2")
    again = rig.take(newer)
    assert encode(msgspec.structs.replace(again, trainer_epoch=epoch)) == encode(first)
    with pytest.raises(Fenced):
        rig.take(epoch)
    with pytest.raises(Fenced):
        rig.commit(first)


def test_refusals_have_their_class(site: Site) -> None:
    rig = site.rig
    epoch = rig.resume()
    (lease,) = rig.leases()
    with pytest.raises(UnknownLease):
        rig.submit(msgspec.structs.replace(lease, group=999))
    with pytest.raises(UnknownVersion):
        rig.submit(lease, episode=rig.episode(lease, spans=[(0, "f" * 64)]))
    with pytest.raises(UnknownVersion):
        rig.resume_at("p", 5, "f" * 64)
    with pytest.raises(NotFound):
        rig.go(site.flow.manifest(m.ManifestRequest(policy="p", version=5)))
    with pytest.raises(BadRequest):
        rig.go(site.flow.operate(m.OperatorRequest(action="explode")))
    rig.submit(lease, 0.0)
    rig.submit(rig.leases()[0], 1.0)
    rig.play_groups(1)
    batch = rig.take(epoch)
    with pytest.raises(VersionConflict):
        rig.commit(msgspec.structs.replace(batch, version=7))
    rig.balanced()


def test_handed_back_leases_are_pending_at_once(site: Site) -> None:
    rig = site.rig
    (lease,) = rig.leases()
    rig.go(site.flow.hand_back(m.HandBackRequest(worker="w", held=(lease.id,))))
    (again,) = rig.leases(worker="v")
    assert (again.group, again.index, again.attempt) == (lease.group, lease.index, lease.attempt + 1)
    with pytest.raises(Fenced):
        rig.submit(lease)
    assert rig.renew([lease]).lost == (lease.id,)


def test_a_caller_that_leaves_a_long_poll_holds_no_lease(site: Site) -> None:
    """There is room for so many episodes; the one who left must not sit on any when room comes."""
    rig = site.rig
    held = rig.lease(1000).leases
    request = m.LeaseRequest(
        worker="v", incarnation="v", count=4, wait_s=8.0, capabilities=m.Capabilities(policies=("p",))
    )

    async def leave() -> None:
        call = asyncio.create_task(site.flow.lease(request))
        done, _ = await asyncio.wait([call], timeout=0.2)
        assert not done, "there was room"
        call.cancel()
        await asyncio.wait([call])
        await asyncio.wait([asyncio.create_task(asyncio.sleep(0.05))])

    rig.go(leave())
    rig.go(site.flow.hand_back(m.HandBackRequest(worker="w", held=tuple(lease.id for lease in held))))
    assert rig.states("episodes").get("leased", 0) == 0
    assert len(rig.lease(1000).leases) == len(held)


def test_direct_and_http_answers_are_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    for kind in ("local", "http"):
        with monkeypatch.context() as patch:
            site = Site(kind, patch)
            epoch = site.rig.resume()
            leases = site.rig.lease(4)
            for lease in leases.leases:
                site.rig.submit(lease, float(lease.index))
            batch = site.rig.batch(epoch)
            answers.append([encode(leases), encode(batch), encode(site.rig.commit(batch.batch))])  # type: ignore[arg-type]
            site.close()
    assert answers[0] == answers[1]
