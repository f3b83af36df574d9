"""A trainer that leaves in the middle of an answer, on a real socket: nothing is consumed, the same bytes come."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator

import msgspec
import pytest

from astraflow.types import Episode
from astraflow.wire import messages as m
from astraflow.wire.codec import decode, encode
from tests.conformance.test_dataflow import real_manifest
from tests.hostile.site import HostileSite
from tests.unit.dataflow import rig as rigs
from tests.unit.dataflow.rig import Rig, sample

TOKENS = 500_000


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostileSite]:
    monkeypatch.setattr(rigs, "manifest", real_manifest)
    found = HostileSite()
    yield found
    found.close()


def large(rig: Rig, episode: Episode) -> Episode:
    """The same with half a million tokens: far more than any socket buffers."""
    (agent,) = episode.trajectories
    long = sample([rig.digest("p")], length=TOKENS)
    turn = msgspec.structs.replace(agent.turns[0], stop=2 + TOKENS)
    return msgspec.structs.replace(
        episode, trajectories=(msgspec.structs.replace(agent, samples=(long,), turns=(turn,)),)
    )


def leave_in_the_middle(site: HostileSite, request: m.BatchRequest, read: int) -> bytes:
    """Ask, read so many bytes of the answer, and reset the connection."""
    body = encode(request)
    head = (
        f"POST /v1/batch HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {site.token('batch')}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )

    async def half() -> bytes:
        host, _, port = site.server.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 16)
        line: socket.socket = writer.get_extra_info("socket")
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.write(head.encode() + body)
        seen = await reader.readexactly(read)
        writer.transport.abort()
        await asyncio.sleep(0.05)
        return seen

    return site.rig.go(half())


def test_guarantee_batch_reissued_identical_after_a_broken_answer(site: HostileSite) -> None:
    rig = site.rig
    rig.commit(decode(site.call("batch", site.good["batch"]).body, m.BatchReply).batch)  # type: ignore[arg-type]
    for _ in range(8):
        for lease in rig.lease(8).leases:
            rig.submit(lease, episode=large(rig, rig.episode(lease, float(lease.index))))
    epoch = site.good["batch"].trainer_epoch  # type: ignore[attr-defined]
    request = m.BatchRequest(policy="p", trainer_epoch=epoch, wait_s=5.0)
    _commit_the_small_ones(rig, epoch)
    for read in (1, 200, 70_000):
        seen = leave_in_the_middle(site, request, read)
        assert seen.startswith(b"HTTP/1.1 200"[:read])
    before = site.dump()
    first, again = site.call("batch", request), site.call("batch", request)
    assert first.body == again.body and len(first.body) > 4 * TOKENS
    assert site.dump() == before, "to ask again consumes nothing"
    batch = decode(first.body, m.BatchReply).batch
    assert batch is not None
    assert rig.db.all("SELECT id, state, trainer_epoch FROM batches WHERE state <> 'committed'") == [
        (batch.id, "issued", epoch)
    ]
    assert rig.commit(batch).version == batch.version + 1
    rig.balanced()
    assert not site.server._polls, "nothing waits for who has left"


def _commit_the_small_ones(rig: Rig, epoch: int) -> None:
    """What was kept before the large groups came."""
    while len((batch := rig.take(epoch)).rows[0].tokens) < 1000:
        rig.commit(batch)


def test_a_trainer_that_leaves_while_it_waits_takes_no_batch_with_it(site: HostileSite) -> None:
    """A long poll whose caller is gone when the batch comes: it is there for the next call."""
    rig = site.rig
    epoch = site.good["batch"].trainer_epoch  # type: ignore[attr-defined]
    rig.commit(rig.take(epoch))
    while rig.batch(epoch).batch is not None:
        rig.commit(rig.take(epoch))
    request = m.BatchRequest(policy="p", trainer_epoch=epoch, wait_s=8.0)

    async def leave() -> None:
        call = asyncio.create_task(site.post_async("batch", encode(request)))
        done, _ = await asyncio.wait({call}, timeout=0.2)
        assert not done
        call.cancel()
        await asyncio.wait({call})
        await asyncio.sleep(0.05)

    rig.go(leave())
    rig.db.run("UPDATE episodes SET state = 'pending', worker = NULL WHERE state = 'leased'")
    rig.play_groups(2)
    assert rig.db.number("SELECT COUNT(*) FROM batches WHERE state = 'issued'") == 0
    assert rig.batch(epoch).batch is not None
    rig.balanced()
