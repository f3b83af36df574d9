"""Replay through the real service: which groups come again, with what, and what the ledger says of it."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astraflow.algorithms.base import ReadyGroup
from astraflow.algorithms.credit import GroupMean, Whitened
from astraflow.algorithms.curate import Mixture, Shuffled
from astraflow.algorithms.keep import DropZeroVariance
from astraflow.algorithms.pace import AllHaveRoom, BoundedStaleness
from astraflow.algorithms.select import EarliestDeadline, Fifo
from astraflow.algorithms.select_mix import WithSupervised
from astraflow.algorithms.select_replay import WithReplay
from astraflow.dataflow.ledger import StoredState
from astraflow.dataflow.tally import state_digest
from astraflow.dataflow.verify import verify
from astraflow.errors import ConfigError, RunFailed
from astraflow.tasks.lists import ListTasks
from astraflow.testing.simulator.checks import check_ledger
from astraflow.testing.simulator.edges import watch
from astraflow.types import Batch, SampleKind, Task
from astraflow.wire.codec import decode, encode
from tests.unit.dataflow.rig import Rig, make_spec, manifest, supervised_episode, tasks


def spec(**more):
    options = {
        "steps": 6,
        "max_staleness": 2,
        "groups_per_batch": 4,
        "select": WithReplay(EarliestDeadline(), ratio=0.5),
    }
    return make_spec(**{**options, **more})


def opened(folder: Path | None = None, **more) -> Rig:
    rig = Rig(spec(**more), folder=folder)
    watch(rig.service.ledger.store.connection)
    return rig


def groups_of(batch: Batch) -> dict[int, int]:
    return {int(row.sample_id.split("/")[0]): row.use for row in batch.rows}


def whole(rig: Rig) -> None:
    rig.balanced()
    connection = rig.service.ledger.store.connection
    assert check_ledger(connection) == []
    assert verify(connection).differences == ()


def test_groups_come_again_as_they_were():
    with opened() as rig:
        epoch = rig.resume()
        first = rig.step(epoch)
        assert groups_of(first) == {1: 0, 2: 0, 3: 0, 4: 0}
        rig.play_groups(2)
        second = rig.take(epoch)
        assert groups_of(second) == {5: 0, 6: 0, 3: 1, 4: 1}
        before = {row.sample_id: row for row in first.rows}
        for row in second.rows:
            if row.use:
                was = before[row.sample_id]
                assert row.advantages == was.advantages and row.spans == was.spans
                np.testing.assert_array_equal(row.logprobs, was.logprobs)
                np.testing.assert_array_equal(row.mask, was.mask)
        assert (second.tokens, second.sequences) == (16, 8), "replayed rows are in the denominators"
        rig.commit(second)
        rig.play_groups(2)
        assert groups_of(rig.take(epoch)) == {7: 0, 8: 0, 5: 1, 6: 1}
        whole(rig)
        assert rig.db.counter("replayed") == 4


def test_a_group_that_comes_again_and_again_counts_its_uses():
    with opened(groups_per_batch=2, max_staleness=4) as rig:
        epoch = rig.resume()
        uses = []
        rig.play_groups(2)
        for _ in range(3):
            batch = rig.take(epoch)
            uses.append(groups_of(batch))
            rig.commit(batch)
            [lease, other] = rig.leases(2)
            for each in (lease, other):
                # Of older weights than the first groups: those are the latest to be replayed.
                rig.submit(each, episode=rig.episode(each, float(each.index), spans=[(0, manifest("p").digest)]))
        assert uses == [{1: 0, 2: 0}, {3: 0, 2: 1}, {4: 0, 3: 1}]
        select = rig.spec.pipeline.select
        assert [group.uses for group in rig.service.ledger.groups.stored("p")] == [1, 2, 2, 1]
        assert select.share(rig.service.ledger.groups.stored("p"), policy="p", need=2) == 1
        whole(rig)


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_guarantee_replayed_rows_obey_the_bound(bound):
    """F57: the age is that at use. With bound 0 nothing is ever replayed."""
    with opened(max_staleness=bound, steps=8) as rig:
        epoch = rig.resume()
        replayed = 0
        for _ in range(8):
            rig.play_groups(4 - rig.service.ledger.groups.rooms()["p"].replayed_groups)
            batch = rig.take(epoch)
            for row in batch.rows:
                assert 0 <= batch.version - min(span.version for span in row.spans) <= bound
                replayed += row.use > 0
            rig.commit(batch)
        assert (replayed > 0) == (bound > 0)
        whole(rig)


def test_a_sample_too_old_for_another_use_is_masked_in_that_batch_alone():
    """Members of versions 0 and 1, bound 1: from version 2 on only the younger may be trained again."""
    with opened(max_staleness=1, groups_per_batch=2) as rig:
        epoch = rig.resume()
        rig.step(epoch)
        leases = rig.leases(2)
        newest = rig.digest("p")
        for lease, span in zip(leases, [(0, manifest("p").digest), newest], strict=True):
            rig.submit(lease, episode=rig.episode(lease, float(lease.index), spans=[span]))
        batch = rig.take(epoch)
        mixed = leases[0].group
        assert groups_of(batch)[mixed] == 0
        rig.commit(batch)
        rig.play_groups(1)
        again = rig.take(epoch)
        assert [(row.sample_id, row.use) for row in again.rows if row.use] == [(f"{mixed}/1/role_p/0", 1)]
        masks = rig.db.all("SELECT idx, state, mask FROM samples WHERE group_id = ? ORDER BY idx", mixed)
        assert masks == [(0, "trained", None), (1, "trained", None)], "its first use is what it was"
        rig.commit(again)
        whole(rig)


def test_advantages_of_the_first_batch_are_frozen():
    """Whitened over the batch that it was in: a replay does not whiten them again."""
    with opened(credit=Whitened(credit=GroupMean(std=False))) as rig:
        epoch = rig.resume()
        first = rig.step(epoch)
        values = {row.sample_id: row.advantages for row in first.rows}
        assert any(abs(run.value) not in (0.0, 0.5) for runs in values.values() for run in runs)
        rig.play_groups(2)
        again = rig.take(epoch)
        for row in again.rows:
            assert row.advantages == values.get(row.sample_id, row.advantages)
        for row in again.rows:
            if not row.use:
                assert abs(row.advantages[0].value) == pytest.approx(3**0.5 / 2, abs=1e-5), (
                    "whitened without the others"
                )


def test_what_was_undone_is_not_replayed_and_comes_again_with_its_uses():
    with opened() as rig:
        epoch = rig.resume()
        first = rig.step(epoch)
        rig.play_groups(2)
        second = rig.take(epoch)
        rig.commit(second)
        epoch = rig.resume(version=0, incarnation="t2")
        assert rig.service.ledger.groups.stored("p") == []
        assert groups_of(rig.take(epoch)) == groups_of(first)
        rig.commit(rig.take(epoch), salt="b")
        assert groups_of(rig.take(epoch)) == groups_of(second)
        rig.commit(rig.take(epoch), salt="b")
        whole(rig)


def test_a_batch_that_made_no_step_leaves_replayed_groups_trained():
    with opened() as rig:
        epoch = rig.resume()
        rig.step(epoch)
        fresh = rig.play_groups(2)
        batch = rig.take(epoch)
        rig.commit(batch, reason="no_signal")
        assert [rig.group(group) for group in fresh] == [("dropped", "no_signal")] * 2
        assert rig.group(3) == rig.group(4) == ("trained", None)
        rig.play_groups(2)
        assert groups_of(rig.take(epoch))[4] == 2, "a use is never given twice, not even of a batch that was dropped"
        whole(rig)


def test_a_rollback_takes_replays_with_it():
    with opened() as rig:
        epoch = rig.resume()
        rig.step(epoch)
        rig.play_groups(2)
        rig.commit(rig.take(epoch))
        rig.roll_back(1)
        assert rig.group(5) == ("dropped", "rolled_back")
        assert rig.group(4) == ("trained", None)
        epoch = rig.resume(version=1, incarnation="t2")
        rig.play_groups(2)
        assert groups_of(rig.take(epoch))[4] == 2
        whole(rig)


def test_same_choices_after_a_restart():
    def histories(restart: bool) -> list[dict[int, int]]:
        def make():
            return spec(select=WithReplay(Fifo(), ratio=0.5, order="uniform", seed=5), max_staleness=3)

        found = []
        with Rig(make()) as rig:
            epoch = rig.resume()
            for _ in range(5):
                rig.play_groups(4 - rig.service.ledger.groups.rooms()["p"].replayed_groups)
                batch = rig.take(epoch)
                found.append(groups_of(batch))
                rig.commit(batch)
                if restart:
                    rig.restart(make())
        return found

    assert histories(True) == histories(False)


@pytest.mark.parametrize("pace", [BoundedStaleness(), AllHaveRoom(), BoundedStaleness(ahead=0)])
@pytest.mark.parametrize("ratio", [0.3, 0.75])
def test_no_more_episodes_are_asked_for_than_fresh_groups_are_needed(pace, ratio):
    """And never fewer: with whatever a worker can get, the run goes on to its end."""
    with opened(pace=pace, select=WithReplay(EarliestDeadline(), ratio=ratio), steps=6) as rig:
        epoch = rig.resume()
        played = 0
        for _ in range(6):
            while rig.batch(epoch).batch is None:
                leases = rig.lease(2).leases
                assert leases, "the batch is not full and no further episode may start"
                for lease in leases:
                    rig.submit(lease, float(lease.index))
                played += 1
            rig.commit(rig.take(epoch))
        assert played < 24, "as many groups as without replay"
        whole(rig)


def test_pruned_groups_are_not_replayed(tmp_path):
    with opened(tmp_path, max_staleness=1, steps=9) as rig:
        epoch = rig.resume()
        for step in range(1, 7):
            rig.play_groups(4 - rig.service.ledger.groups.rooms()["p"].replayed_groups)
            rig.commit(rig.take(epoch), oldest=step - 1)
            rig.advance(1.0)
        assert rig.db.number("SELECT COUNT(*) FROM pruned_groups") > 0
        kept = {group.group for group in rig.service.ledger.groups.stored("p")}
        assert kept and not kept & {row[0] for row in rig.db.all("SELECT group_id FROM pruned_groups")}
        whole(rig)


class Wrong:
    """A Select of somebody else, with a mistake."""

    def __init__(self, answer):
        self.answer = answer

    def pick(self, ready: list[ReadyGroup], *, need: int, oldest_open: int | None) -> list[int]:
        return [group.group for group in ready[:need]] if len(ready) >= need else []

    def share(self, stored, *, policy, need):
        return 1

    def pick_with(self, ready, stored, *, policy, need, oldest_open):
        return self.answer(ready, stored) if stored else (self.pick(ready, need=need, oldest_open=oldest_open), [])


@pytest.mark.parametrize(
    "answer",
    [
        lambda ready, stored: ([1, 2], []),
        lambda ready, stored: ([ready[0].group], [ready[0].group]),
        lambda ready, stored: ([], [1, 1]),
        lambda ready, stored: ([ready[0].group], [99]),
        lambda ready, stored: ([ready[0].group], []),
    ],
)
def test_a_select_that_replays_what_it_cannot_stops_the_run_and_is_named(answer):
    with opened(groups_per_batch=2, select=Wrong(answer)) as rig:
        epoch = rig.resume()
        rig.step(epoch)
        rig.play_groups(1)
        with pytest.raises(RunFailed, match=r"Wrong\.pick_with for policy p must answer 2"):
            rig.batch(epoch)


def test_while_fresh_groups_are_missing_the_trainer_hears_how_many_and_what_comes_again():
    with opened() as rig:
        epoch = rig.resume()
        rig.step(epoch)
        rig.play_groups(1)
        why = rig.batch(epoch).why
        assert why.startswith("1/2 groups kept, 0 open; 2 come again")


def test_supervised_groups_are_in_the_batches_beside_fresh_and_replayed_ones_and_never_come_again():
    talks = [Task(key=f"talk-{n}", workflow="supervised", payload={"policy": "p"}) for n in range(20)]
    parts = [Shuffled(ListTasks("talks", talks), group_size=1), Shuffled(tasks(), group_size=2)]
    select = WithReplay(WithSupervised(EarliestDeadline(), share=0.25), ratio=0.25)
    with opened(curate=Mixture(parts, weights=[0.45, 0.55]), select=select, keep=(DropZeroVariance(),)) as rig:
        epoch = rig.resume()
        kinds = []
        for _ in range(5):
            while rig.batch(epoch).batch is None:
                [lease] = rig.leases(1)
                supervised = lease.task.workflow == "supervised"
                rig.submit(lease, float(lease.index), episode=supervised_episode(lease) if supervised else None)
            batch = rig.take(epoch)
            kinds.append({int(row.sample_id.split("/")[0]): (row.kind, row.use) for row in batch.rows})
            rig.commit(batch)
        of_kind = [sum(kind is SampleKind.SUPERVISED for kind, _ in groups.values()) for groups in kinds]
        assert sum(of_kind) >= 4 and max(of_kind) <= 2, "a second one only where nothing else was under way"
        for number, groups in enumerate(kinds):
            assert len(groups) == 4
            supervised = [use for kind, use in groups.values() if kind is SampleKind.SUPERVISED]
            assert set(supervised) <= {0}, "never again"
            assert sum(use for _, use in groups.values()) == (number > 0)
        whole(rig)


# ── a ledger of another version of the program ──


def rewritten(rig: Rig, change: Any) -> bytes:
    """What the algorithms know, as a program of another version has stored it."""
    connection = rig.service.ledger.store.connection
    (stored,) = connection.execute("SELECT state FROM algorithms").fetchone()
    state = decode(stored, StoredState)
    change(state.state["select"])
    connection.execute("UPDATE algorithms SET state = ?", (encode(state),))
    told = json.dumps({"digest": state_digest(encode(state))})
    connection.execute("UPDATE events SET data = ? WHERE kind = 'algorithms'", (told,))
    return encode(state)


def test_a_run_from_before_a_field_was_added_goes_on(tmp_path: Path) -> None:
    """Older ``WithReplay`` did not carry on what rounding leaves."""
    with opened(tmp_path, select=WithReplay(EarliestDeadline(), ratio=0.3)) as rig:
        epoch = rig.resume()
        rig.step(epoch)
        older = rewritten(rig, lambda select: select.pop("owed"))
        rig.restart(spec(select=WithReplay(EarliestDeadline(), ratio=0.3)))
        whole(rig)
        assert rig.db.all("SELECT state FROM algorithms") == [(older,)], "to read is not to write"
        epoch = rig.resume(version=1, incarnation="again")
        rig.step(epoch)
        (row,) = rig.db.all("SELECT state FROM algorithms")
        assert decode(row[0], StoredState).state["select"]["owed"] == {"p": "1/5"}, "of 4, three tenths: 1 came again"
        whole(rig)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda select: select.pop("draws"), "select (WithReplay) cannot read what is stored of it: it lacks 'draws'"),
        (
            lambda select: select.update(owed=[1]),
            "select (WithReplay) cannot read what is stored of it: AttributeError",
        ),
        (lambda select: select.update(quota=1), "select (WithReplay) does not know what is stored of it as quota"),
    ],
)
def test_a_state_that_cannot_be_read_says_what_where_and_what_to_do(tmp_path: Path, change: Any, words: str) -> None:
    with opened(tmp_path) as rig:
        rig.step(rig.resume())
        other = rewritten(rig, change)
        with pytest.raises(ConfigError) as refused:
            rig.restart(spec())
        said = str(refused.value)
        assert said.startswith(f"the algorithms' state in {tmp_path / 'run.db'}: {words}")
        assert said.endswith("go on with that one, or start a new run")
        with closing(sqlite3.connect(tmp_path / "run.db")) as db:
            assert db.execute("SELECT state FROM algorithms").fetchall() == [(other,)]


def test_bytes_that_are_no_state_are_refused_likewise(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        rig.service.ledger.store.connection.execute("UPDATE algorithms SET state = x'00'")
        with pytest.raises(ConfigError, match=r"^the algorithms' state in .*run\.db: StoredState: .*start a new run$"):
            rig.restart(spec())
