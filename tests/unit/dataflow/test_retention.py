"""What is pruned, when, and that nothing which could still be asked for ever is."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from astraflow.dataflow import retention
from astraflow.dataflow.retention import Frontier, Standing, is_spent, spent_evals
from astraflow.dataflow.settings import EvalSpec, Limits, PolicySpec
from astraflow.errors import ConfigError, NotFound, Pruned
from astraflow.types import Batch, Episode, Lease, Sample
from tests.unit.dataflow.rig import Rig, make_spec, tasks

FRONTIER = Frontier(versions={"p": 6, "q": 4}, bounds={"p": 1, "q": 0}, before=100.0, evals=frozenset({2}))
State = tuple[str, int | None, int | None]


def standing(p: State, q: State = ("dropped", None, None), *, closed: bool = True, ended_at: float = 50.0) -> Standing:
    return Standing(group=1, closed=closed, ended_at=ended_at, eval_id=None, policies={"p": p, "q": q})


@pytest.mark.parametrize(
    ("group", "spent"),
    [
        (standing(("trained", 6, 4)), True),
        (standing(("trained", 7, 4)), False),  # made after the oldest checkpoint: a resume would repeat it
        (standing(("trained", 6, 5)), False),  # one version old at 6: a replay may still train it
        (standing(("trained", 6, None)), True),  # supervised
        (standing(("trained", 6, 4), ("trained", 4, 3)), True),
        (standing(("trained", 6, 4), ("trained", 5, 3)), False),  # covered by one trainer, not by the other
        (standing(("trained", 6, 4), ("batched", None, 3)), False),
        (standing(("kept", None, 4)), False),
        (standing(("dropped", None, None), ("stale", None, 1)), True),
        (standing(("dropped", None, None), ended_at=100.5), False),  # newer than what any checkpoint covers
        (standing(("trained", 6, 4), closed=False), False),
    ],
)
def test_a_group_is_spent_when_every_policy_is_through_with_it(group: Standing, spent: bool) -> None:
    assert is_spent(group, FRONTIER) is spent


def test_a_policy_that_told_of_no_checkpoint_covers_nothing() -> None:
    frontier = Frontier(versions={"p": 6}, bounds={"p": 1}, before=100.0)
    assert not is_spent(standing(("trained", 6, 4), ("trained", 1, 0)), frontier)


def test_an_evaluation_goes_only_from_between_the_first_and_the_last() -> None:
    done = [(0, 1), (2, 2), (4, 3), (6, 4), (8, 5)]
    assert spent_evals(done, 6) == {2, 3}
    assert spent_evals(done, 100) == {2, 3, 4}
    assert spent_evals(done[:2], 100) == frozenset()
    assert spent_evals(done, None) == frozenset()


def stored(rig: Rig) -> set[int]:
    return {group for (group,) in rig.db.all("SELECT DISTINCT group_id FROM payloads")}


def frozen(rig: Rig) -> set[int]:
    return {batch for (batch,) in rig.db.all("SELECT id FROM batches WHERE rows IS NOT NULL OR file IS NOT NULL")}


def tick(rig: Rig) -> None:
    rig.advance(1.0)
    rig.advance(1.0)  # what the first tick began, the next transactions end


def trained_at(rig: Rig, version: int) -> set[int]:
    return {group for (group,) in rig.db.all("SELECT group_id FROM group_policy WHERE version = ?", version)}


def test_guarantee_nothing_is_pruned_that_a_resume_could_need() -> None:
    """Six steps with checkpoints 2 and 4: what made versions 1 and 2 goes, the rest comes again byte for byte."""
    with Rig(make_spec(steps=9, max_staleness=1)) as rig:
        epoch = rig.resume()
        batches = [rig.step(epoch) for _ in range(5)]
        tick(rig)
        assert (len(stored(rig)), frozen(rig)) == (10, {1, 2, 3, 4, 5})
        batches.append(rig.step(epoch, oldest=4))
        tick(rig)
        # Bound 1: of the groups in the checkpoint, those sampled at version 3 could be replayed once more.
        assert not stored(rig) & (trained_at(rig, 1) | trained_at(rig, 2) | trained_at(rig, 3))
        assert stored(rig) == trained_at(rig, 4) | trained_at(rig, 5) | trained_at(rig, 6)
        assert frozen(rig) == {5, 6}
        rig.balanced()
        with pytest.raises(Pruned, match="cannot go back to version 3: the data of its steps up to 4 is pruned"):
            rig.resume(version=3, incarnation="t2")
        again = rig.resume_at("p", 4, rig.db.one("SELECT digest FROM publications WHERE version = 4")[0])
        assert again.undone == (5, 6)
        for before in batches[4:]:
            issued = rig.take(again.trainer_epoch)
            assert msgspec.structs.replace(issued, trainer_epoch=0).id == before.id
            rig.commit(issued)
        tick(rig)
        assert frozen(rig) == {5, 6}, "the new trainer has told of no checkpoint"


def test_without_a_report_nothing_is_ever_pruned() -> None:
    with Rig(make_spec(steps=5)) as rig:
        epoch = rig.resume()
        for _ in range(4):
            rig.step(epoch)
        tick(rig)
        assert len(stored(rig)) == 8
        assert rig.db.number("SELECT COUNT(*) FROM events WHERE kind = 'pruned'") == 0


def test_retain_all_keeps_everything_and_goes_back_as_far_as_one_likes() -> None:
    with Rig(make_spec(steps=5, limits=Limits(retain="all"))) as rig:
        epoch = rig.resume()
        for step in range(4):
            rig.step(epoch, oldest=step)
        tick(rig)
        assert len(stored(rig)) == 8
        assert rig.resume_at("p", 0, rig.digest_at(0), incarnation="t2").undone == (1, 2, 3, 4)


def test_retain_is_checked() -> None:
    with pytest.raises(ConfigError, match="'checkpoint' or 'all', found 'some'"):
        Limits(retain="some")  # type: ignore[arg-type]


def test_rolling_back_further_than_pruned_is_refused_and_changes_nothing() -> None:
    with Rig(make_spec(steps=9, max_staleness=0)) as rig:
        epoch = rig.resume()
        for step in range(5):
            rig.step(epoch, oldest=min(step, 3))
        tick(rig)
        before = rig.db.all("SELECT * FROM batches")
        with pytest.raises(Pruned, match="policy p cannot go back to version 2"):
            rig.roll_back(2)
        assert rig.db.all("SELECT * FROM batches") == before
        rig.roll_back(3)
        assert rig.db.one("SELECT version FROM policies") == (3,)
        assert rig.db.get("oldest_checkpoint/p") is None


@pytest.mark.parametrize("oldest", [-1, 0, 99])
def test_a_checkpoint_that_cannot_be_is_not_believed(oldest: int) -> None:
    with Rig(make_spec(steps=5, max_staleness=0)) as rig:
        epoch = rig.resume()
        for _ in range(3):
            rig.step(epoch, oldest=oldest)
        tick(rig)
        assert len(stored(rig)) == 6


def test_a_group_of_two_policies_waits_for_both_checkpoints() -> None:
    policies = {name: PolicySpec(max_staleness=0, groups_per_batch=1) for name in ("p", "q")}
    with Rig(make_spec(steps=9, policies=policies)) as rig:
        epochs = {name: rig.resume(name) for name in policies}
        for oldest in (None, 1, 2):
            rig.play_groups(1)
            rig.commit(rig.take(epochs["p"], "p"), oldest=oldest)
            rig.commit(rig.take(epochs["q"], "q"))
        tick(rig)
        assert len(stored(rig)) == 3
        rig.play_groups(1)
        rig.commit(rig.take(epochs["q"], "q"), oldest=1)
        tick(rig)
        assert stored(rig) == {2, 3, 4}


def test_dropped_batches_and_groups_go_too() -> None:
    with Rig(make_spec(steps=9, max_staleness=0)) as rig:
        epoch = rig.resume()
        rig.play_groups(2)
        rig.commit(rig.take(epoch), reason="no_signal")
        rig.step(epoch)
        rig.step(epoch, oldest=1)
        tick(rig)
        assert frozen(rig) == {3}
        assert stored(rig) == {5, 6}


def test_texts_of_the_first_and_the_last_evaluation_stay() -> None:
    evals = EvalSpec(tasks=tasks(4, name="held"), count=2, every=1)
    with Rig(make_spec(steps=6, max_staleness=0, groups_per_batch=1, evals=evals, limits=Limits(eval_share=1))) as rig:
        epoch = rig.resume()
        for step in range(5):
            while leases := rig.lease(8).leases:
                for lease in leases:
                    rig.submit(lease, float(lease.index))
                if rig.db.number("SELECT COUNT(*) FROM group_policy WHERE state = 'kept'"):
                    break
            rig.commit(rig.take(epoch), oldest=max(0, step - 1))
        tick(rig)
        kept = rig.db.all(
            "SELECT DISTINCT e.version FROM payloads p JOIN groups g ON g.id = p.group_id "
            "JOIN evals e ON e.id = g.eval_id ORDER BY 1"
        )
        assert kept[0] == (0,)
        assert (1,) not in kept and (2,) not in kept
        assert kept[-1][0] >= 4


def test_pruned_bytes_say_so() -> None:
    with Rig(make_spec(steps=5, max_staleness=0)) as rig:
        epoch = rig.resume()
        rig.step(epoch)
        rig.step(epoch, oldest=1)
        tick(rig)
        assert rig.service.ledger.payloads.episodes(1, 2) == [None, None]
        with pytest.raises(NotFound, match="pruned"):
            rig.service.ledger.payloads.unpack(Batch, None, None)
        size = rig.db.one("SELECT episodes, bytes FROM pruned_groups WHERE group_id = 1")
        assert size[0] == 2 and size[1] > 100
        assert rig.db.number("SELECT COUNT(*) FROM samples") == 8, "metadata stays"


# ── files ──


def big(rig: Rig, lease: Lease, seed: int, *, length: int) -> Episode:
    """An episode of ``length`` sampled tokens that do not compress."""
    episode = rig.episode(lease, float(lease.index))
    rng = np.random.default_rng(seed)
    old = episode.trajectories[0].samples[0]
    tokens = rng.integers(0, 2**31 - 1, length, dtype=np.int32)
    sampled = np.arange(length) >= 2
    sample = Sample(
        tokens=tokens,
        sampled=sampled,
        logprobs=np.where(sampled, -rng.random(length, dtype=np.float32), np.float32(0)).astype(np.float32),
        spans=(msgspec.structs.replace(old.spans[0], start=2, stop=length),),
    )
    turn = msgspec.structs.replace(episode.trajectories[0].turns[0], start=2, stop=length)
    trajectory = msgspec.structs.replace(episode.trajectories[0], samples=(sample,), turns=(turn,))
    return msgspec.structs.replace(episode, trajectories=(trajectory,))


def big_step(
    rig: Rig, epoch: int, seeds: random.Random, *, length: int, oldest: int | None, same: bool = False
) -> None:
    seed = seeds.randrange(2**32)
    for lease in rig.leases(4):
        rig.submit(
            lease, episode=big(rig, lease, seed + (0 if same else 10 * lease.group + lease.index), length=length)
        )
    rig.commit(rig.take(epoch), oldest=oldest)


def files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "payloads").iterdir()}


def named(rig: Rig) -> set[str]:
    return {
        name
        for (name,) in rig.db.all("SELECT file FROM payloads WHERE file IS NOT NULL UNION "
                                  "SELECT file FROM batches WHERE file IS NOT NULL")
    }  # fmt: skip


def test_files_go_after_the_transaction_and_only_without_another_name(tmp_path: Path) -> None:
    with Rig(make_spec(steps=9, max_staleness=0), folder=tmp_path) as rig:
        epoch, seeds = rig.resume(), random.Random(1)
        for _ in range(2):
            big_step(rig, epoch, seeds, length=200_000, oldest=None)
        assert len(files(tmp_path)) == 10
        # An episode of a later group has the very same bytes as one of the first: one file for both.
        shared = rig.db.one("SELECT file FROM payloads WHERE group_id = 1")[0]
        rig.db.run("UPDATE payloads SET file = ? WHERE group_id = 4 AND idx = 1", (shared,))
        big_step(rig, epoch, seeds, length=200_000, oldest=1)
        real, seen = rig.service.ledger.payloads.remove, []

        def remove(name: str) -> None:
            assert not rig.db.connection.in_transaction
            assert rig.db.number("SELECT COUNT(*) FROM payloads WHERE group_id IN (1, 2)") == 0
            seen.append(name)
            real(name)

        rig.service.ledger.payloads.remove = remove  # type: ignore[method-assign]
        tick(rig)
        assert shared in seen
        assert shared in files(tmp_path)
        assert named(rig) <= files(tmp_path)
        assert len(seen) == 5


def test_a_file_that_a_dying_process_left_goes_with_the_next_one(tmp_path: Path) -> None:
    with Rig(make_spec(steps=9, max_staleness=0), folder=tmp_path) as rig:
        epoch = rig.resume()
        big_step(rig, epoch, random.Random(1), length=200_000, oldest=None)
        for name in ("0" * 64, "1" * 64 + ".part"):
            (tmp_path / "payloads" / name).write_bytes(b"garbage")
        rig.restart(make_spec(steps=9, max_staleness=0))
        tick(rig)
        assert files(tmp_path) == named(rig)
        assert len(files(tmp_path)) == 5


def test_a_transaction_that_fails_leaves_rows_and_files(tmp_path: Path) -> None:
    with Rig(make_spec(steps=9, max_staleness=0), folder=tmp_path) as rig:
        epoch, seeds = rig.resume(), random.Random(1)
        big_step(rig, epoch, seeds, length=200_000, oldest=None)
        big_step(rig, epoch, seeds, length=200_000, oldest=1)
        before = files(tmp_path)
        service = rig.service
        service._retention.begin()
        with pytest.raises(RuntimeError, match="power"), service.ledger.store.transaction():
            service._retention.prune(100.0)
            raise RuntimeError("power")
        service._undone()
        service._after()
        assert files(tmp_path) == before
        assert named(rig) <= before
        tick(rig)
        assert files(tmp_path) == named(rig) and len(before) == 10 and len(files(tmp_path)) == 5


def test_a_slice_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "LOOKED_AT", 3)
    with Rig(make_spec(steps=20, max_staleness=0)) as rig:
        epoch = rig.resume()
        for step in range(10):
            rig.step(epoch, oldest=9 if step == 9 else None)
        service = rig.service
        service._retention.begin()
        per_slice = []
        more = True
        while more:
            before = len(stored(rig))
            with service.ledger.store.transaction():
                more = service._retention.prune(50.0)
            per_slice.append(before - len(stored(rig)))
        assert sum(per_slice) == 18
        assert max(per_slice) <= 3
        assert len(frozen(rig)) == 1


def pages(rig: Rig) -> tuple[int, int]:
    return rig.db.number("PRAGMA page_count"), rig.db.number("PRAGMA freelist_count")


@pytest.mark.slow
def test_the_file_stays_flat_over_thousands_of_episodes(tmp_path: Path) -> None:
    """3,200 trained episodes of 32 KiB: without retention 200 MiB with their batches, with it what a window holds.

    The pages of what is pruned are used again: from one half of the run to the other only metadata are added.
    """
    steps, length = 200, 4_000
    sizes: list[int] = []
    written = 0
    spec = make_spec(steps=steps + 1, max_staleness=0, groups_per_batch=2, group_size=8)
    with Rig(spec, folder=tmp_path) as rig:
        rig.db.run("PRAGMA synchronous = OFF")  # of where bytes lie, not of when
        epoch = rig.resume()
        for step in range(steps):
            for lease in rig.leases(16):
                rig.submit(lease, episode=big(rig, lease, lease.group * 8 + lease.index, length=length))
            rig.commit(rig.take(epoch), oldest=step - step % 5 or None)
            rig.advance(1.0)
            if step in (steps // 2, steps - 1):
                written = rig.db.number("SELECT SUM(bytes) FROM pruned_groups")
                sizes.append(pages(rig)[0] * 4096)
        assert rig.db.number("SELECT COUNT(*) FROM episodes WHERE state = 'done'") == 3_200
        assert rig.db.number("SELECT SUM(episodes) FROM pruned_groups") > 3_000
        log = (tmp_path / "run.db-wal").stat().st_size
        used = (pages(rig)[0] - pages(rig)[1]) * 4096
    grown = (sizes[1] - sizes[0]) / (3_200 / 2)
    print(f"run.db {sizes[0] / 2**20:.1f} MiB, then {sizes[1] / 2**20:.1f} MiB ({used / 2**20:.1f} used); pruned "
          f"{written / 2**20:.0f} MiB; {grown:.0f} bytes an episode are kept")  # fmt: skip
    assert written > 75 << 20
    assert grown < 2_500, "bytes that an episode of 32 KiB leaves behind"
    assert sizes[1] < written / 8
    assert log < 40 << 20
