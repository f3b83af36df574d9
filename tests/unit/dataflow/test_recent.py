"""The memory of decoded episodes: bounded, never more than the tables say, and no way to change what is frozen."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from astraflow.dataflow import payloads
from astraflow.dataflow.ledger import Ledger
from astraflow.dataflow.payloads import Recent
from astraflow.dataflow.store import connect
from astraflow.errors import Fenced
from astraflow.types import Episode, Outcome, Sample, Trajectory
from astraflow.wire.codec import decode, encode
from tests.unit.dataflow.rig import Rig, make_spec


def as_read(episode: Episode) -> Episode:
    """As it comes over the wire: its arrays cannot be changed."""
    return decode(encode(episode), Episode)


def made(key: str = "t") -> Episode:
    sample = Sample(
        tokens=np.arange(4, dtype=np.int32), sampled=np.zeros(4, np.bool_), logprobs=np.zeros(4, np.float32)
    )
    player = Trajectory(agent="a", role="a", policy="p", samples=(sample,))
    return Episode(task_key=key, outcome=Outcome.COMPLETED, trajectories=(player,))


def test_oldest_groups_go_first_and_only_so_much_is_kept() -> None:
    recent = Recent(limit_bytes=100)
    for group in range(5):
        for idx in range(2):
            recent.put(group, idx, 20, as_read(made()))
    assert [recent.get(group, 1) is not None for group in range(5)] == [False, False, False, True, True]
    recent.put(9, 0, 101, as_read(made()))
    assert recent.get(9, 0) is None and recent._bytes == 0


def test_an_episode_that_its_worker_can_still_change_is_not_kept() -> None:
    recent = Recent()
    recent.put(1, 0, 20, as_read(made()))
    recent.put(1, 0, 20, made("newer"))
    assert recent.get(1, 0) is None and recent._bytes == 0


def test_put_again_counts_once() -> None:
    recent = Recent()
    recent.put(1, 0, 20, as_read(made()))
    recent.put(1, 0, 30, as_read(made("newer")))
    found = recent.get(1, 0)
    assert found is not None and found.task_key == "newer" and recent._bytes == 30
    recent.drop(1)
    assert recent._bytes == 0


@pytest.mark.parametrize("scope", ["savepoint", "transaction"])
def test_what_is_rolled_back_is_forgotten(scope: str) -> None:
    """The row of before is what is found, though a newer episode was put under the same name, maybe the same id."""
    ledger = Ledger(connect(":memory:"), make_spec())
    ledger.open()
    store = ledger.store
    with store.transaction():
        ledger.groups.admit(0.0, task=ledger.spec.pipeline.curate.next().task, size=1)  # type: ignore[union-attr]
        ledger.payloads.put_episode(1, 0, as_read(made("stored")))

    def put() -> None:
        ledger.payloads.put_episode(1, 0, as_read(made("rolled back")))
        found = ledger.payloads.episodes(1, 1)[0]
        assert found is not None and found.task_key == "rolled back"
        raise Fenced("no")

    if scope == "transaction":
        with pytest.raises(Fenced), store.transaction():
            put()
    else:
        with store.transaction(), pytest.raises(Fenced), store.savepoint():
            put()
    found = ledger.payloads.episodes(1, 1)[0]
    assert found is not None and found.task_key == "stored"
    store.connection.close()


def play(monkeypatch: pytest.MonkeyPatch, *, remembers: bool) -> tuple[list[bytes], list[str]]:
    """Two steps by read-only episodes: the bytes of every batch, taken twice, and what was decoded anew."""
    decoded: list[str] = []
    unpack = payloads.Payloads.unpack

    def counted(self: Any, kind: Any, file: Any, body: Any) -> Any:
        decoded.append(kind.__name__)
        return unpack(self, kind, file, body)

    batches = []
    with monkeypatch.context() as patch:
        patch.setattr(payloads.Payloads, "unpack", counted)
        if not remembers:
            patch.setattr(payloads, "_is_frozen", lambda _: False)
        with Rig(make_spec(steps=2)) as rig:
            epoch = rig.resume()
            for _ in range(2):
                for lease in rig.leases(4):
                    rig.submit(lease, episode=as_read(rig.episode(lease, float(lease.index))))
                batch = rig.take(epoch)
                batches += [encode(batch), encode(rig.take(epoch))]
                if not remembers:
                    rig.restart()
                    batches[-1] = encode(rig.take(epoch))
                rig.commit(batch)
            rig.balanced()
    return batches, decoded


def test_guarantee_batch_reissued_identical_whether_remembered_or_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    remembered, decoded = play(monkeypatch, remembers=True)
    read, decoded_again = play(monkeypatch, remembers=False)
    assert remembered == read and remembered[0] == remembered[1]
    assert decoded == [] and set(decoded_again) == {"Episode", "Batch"}


def test_a_frozen_row_cannot_be_changed_by_who_trains_it() -> None:
    with Rig() as rig:
        epoch = rig.resume()
        rig.play_groups(2)
        batch = rig.take(epoch)
        before = encode(batch)
        for row in batch.rows:
            for name in ("tokens", "mask", "logprobs"):
                with pytest.raises(ValueError, match="read-only"):
                    getattr(row, name)[0] = 1
        assert encode(msgspec.structs.replace(rig.take(epoch))) == before
