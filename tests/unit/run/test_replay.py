"""A run's past is told again by its own algorithms, decision by decision; by others with bounds on what is unknown.

The ledgers are those of a real dataflow service, played by hand in every way that a run may take.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astraflow.algorithms.curate import (
    Dots,
    FilterSolved,
    Greso,
    Mixture,
    Prioritised,
    Shuffled,
    Stage,
    Stages,
    Uniform,
)
from astraflow.algorithms.keep import DropZeroVariance
from astraflow.algorithms.keep_subset import MaxVariance
from astraflow.algorithms.select import EarliestDeadline, Fifo
from astraflow.algorithms.select_replay import WithReplay
from astraflow.dataflow.ledger import StoredState
from astraflow.dataflow.settings import PolicySpec, RunSpec
from astraflow.errors import Closed
from astraflow.run.replay.figures import compared, figures_of, happened, signals_of
from astraflow.run.replay.record import Record, RecordedGroup, read_record
from astraflow.run.replay.rerun import NEVER_MADE, Rerun
from astraflow.run.replay.slots import Stock
from astraflow.run.run_db import RunDb
from astraflow.tasks.lists import ListTasks
from astraflow.types import FailureKind, Lease
from astraflow.wire.codec import encode
from tests.unit.dataflow.rig import Rig, make_spec, supervised_episode, tasks

REWARDS = (0.0, 0.0, 0.5, 1.0, 1.0)


def record_of(rig: Rig) -> Record:
    return read_record(RunDb(rig.db.connection), Path("nowhere"))


def rerun(rig: Rig, spec: RunSpec, **more: Any) -> Rerun:
    return Rerun(spec, record_of(rig), **more).run()


def stored_state(rig: Rig) -> bytes:
    (state,) = rig.db.one("SELECT state FROM algorithms WHERE name = 'pipeline'")
    return bytes(state)


class Player:
    """A run played by dice: overlapping groups, failures, trainers that go further back, steps that are none."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.dice = random.Random(seed)
        self.held: list[Lease] = []
        self.epochs = {name: rig.resume(name, incarnation=f"{name}-0") for name in rig.spec.trainable}
        self.starts = 0

    def play(self, moves: int) -> None:
        for _ in range(moves):
            self.dice.choice(
                (self._lease, self._submit, self._submit, self._submit, self._step, self._step, self._odd)
            )()

    def _lease(self) -> None:
        self.held += self.rig.lease(self.dice.randint(1, 6)).leases

    def _submit(self) -> None:
        if self.held:
            with contextlib.suppress(Closed):  # its group was cancelled meanwhile
                self._submit_one()

    def _submit_one(self) -> None:
        lease = self.held.pop(self.dice.randrange(len(self.held)))
        if lease.task.workflow == "supervised":
            self.rig.submit(lease, episode=supervised_episode(lease))
        elif self.dice.random() < 0.2:
            self.rig.submit_failed(lease, self.dice.choice((FailureKind.INFRA, FailureKind.WORKFLOW)))
        else:
            # By task, so that algorithms have something to learn: some are always solved, some never.
            sure = {0: 1.0, 1: 0.0}.get(sum(map(ord, lease.task.key)) % 4)
            self.rig.submit(lease, self.dice.choice(REWARDS) if sure is None else sure)

    def _step(self) -> None:
        policy = self.dice.choice(list(self.epochs))
        reply = self.rig.batch(self.epochs[policy], policy)
        if reply.batch is not None and self.dice.random() < 0.8:
            reason = self.dice.choice(("no_signal", "non_finite")) if self.dice.random() < 0.15 else None
            self.rig.commit(reply.batch, reason=reason)

    def _odd(self) -> None:
        roll = self.dice.random()
        policy = self.dice.choice(list(self.epochs))
        version = self.rig.digest(policy)[0]
        if roll < 0.15:
            self._resume(policy, max(0, version - self.dice.randint(0, 2)))
        elif roll < 0.2 and version:
            back = max(0, version - 1)
            self.rig.roll_back(back, policy)
            self._resume(policy, back)
        elif roll < 0.25:
            self.rig.restart(self.rig.spec)

    def _resume(self, policy: str, version: int) -> None:
        self.starts += 1
        name = f"{policy}-{self.starts}"
        reply = self.rig.resume_at(policy, version, self.rig.digest_at(version, policy), incarnation=name)
        self.epochs[policy] = reply.trainer_epoch


ROWS = tasks(12)
TALKS = tasks(4, workflow="supervised", name="talks")
PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffled": lambda: {"curate": Shuffled(ROWS, group_size=3)},
    "greso": lambda: {"curate": Greso(ROWS, group_size=3), "keep": (DropZeroVariance(),)},
    "dots": lambda: {"curate": Dots(ROWS, group_size=3, refresh=2, rest=3), "keep": (DropZeroVariance(),)},
    "prioritised, fifo": lambda: {"curate": Prioritised(ROWS, group_size=2, rest=2), "select": Fifo(window=6)},
    "stages": lambda: {
        "curate": Stages(
            [
                Stage(curate=Shuffled(TALKS, group_size=3), groups=5),
                Stage(curate=Mixture([FilterSolved(ROWS, group_size=3), Uniform(tasks(3, name="b"), group_size=2)],
                                     weights=[2, 1])),
            ]
        ),
        "keep": (DropZeroVariance(),),
    },
    "with replay": lambda: {
        "curate": Greso(ROWS, group_size=2),
        "keep": (DropZeroVariance(),),
        "select": WithReplay(EarliestDeadline(), ratio=0.5, order="prioritised", seed=4),
    },
    "pods": lambda: {"curate": Shuffled(ROWS, group_size=4), "keep": (MaxVariance(keep=2),)},
    "used up": lambda: {"curate": Shuffled(tasks(9), group_size=2, epochs=2)},
}  # fmt: skip


def spec_of(name: str, *, policies: int = 1, max_staleness: int = 2) -> RunSpec:
    named = {
        f"p{n}" if n else "p": PolicySpec(max_staleness=max_staleness, groups_per_batch=2 + n) for n in range(policies)
    }
    return make_spec(steps=500, policies=named, **PARTS[name]())


@pytest.mark.parametrize("policies", [1, 2])
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("seed", range(3))
def test_its_own_algorithms_decide_exactly_as_recorded(name: str, policies: int, seed: int) -> None:
    with Rig(spec_of(name, policies=policies, max_staleness=seed)) as rig:
        Player(rig, seed).play(300)
        rig.balanced()
        spec = spec_of(name, policies=policies, max_staleness=seed)
        again = rerun(rig, spec)
        found = compared(again)
        assert found.differences == ()
        assert encode(StoredState(state=spec.pipeline.state_dict())) == stored_state(rig), "and know the same"
        assert found.admissions > 10 and found.verdicts > 10 and found.batches > 1
        then = happened(again.record, again.spec, signals_of(again))
        assert figures_of(again) == then
        stored = {policy: rig.service.ledger.policies.versions[policy] for policy in again.spec.trainable}
        assert {policy: each.steps for policy, each in then.items()} == stored


def test_the_played_runs_took_every_turn() -> None:
    """What the comparison above covers: it would be worth little if nothing was ever undone, stale or replayed."""
    kinds: set[str] = set()
    ends: set[str] = set()
    for name, policies, seed in (("greso", 2, 0), ("with replay", 2, 1), ("prioritised, fifo", 2, 0)):
        with Rig(spec_of(name, policies=policies, max_staleness=seed)) as rig:
            Player(rig, seed).play(400)
            kinds |= {kind for (kind,) in rig.db.all("SELECT DISTINCT kind FROM events")}
            ends |= {f"{state} {reason}" for state, reason in rig.db.all("SELECT state, reason FROM group_policy")}
            kinds |= {"replayed"} if rig.db.one("SELECT 1 FROM batch_groups WHERE use > 0") else set()
    assert {"undone", "resumed", "rolled_back", "batch_dropped", "stale", "failed", "replayed"} <= kinds
    reasons = {"surplus", "zero_variance", "too_few", "no_signal", "rolled_back"}
    assert {f"dropped {reason}" for reason in reasons} | {"stale None", "trained None"} <= ends


# ── other algorithms ──


def play_all(rig: Rig, groups: int, rewards: Callable[[Lease], float], *, leases: int = 2) -> None:
    """One group after the other, and a step as soon as there is a batch."""
    epoch = rig.resume()
    for _ in range(groups):
        for lease in rig.lease(leases).leases:
            rig.submit(lease, rewards(lease))
        if (reply := rig.batch(epoch)).batch is not None:
            rig.commit(reply.batch)


def odd_one_out(lease: Lease) -> float:
    """Every third task has no variance."""
    return float(lease.index) if int(lease.task.key.rpartition("-")[2]) % 3 else 1.0


def other(spec: RunSpec, **changes: Any) -> RunSpec:
    return dataclasses.replace(spec, pipeline=dataclasses.replace(spec.pipeline, **changes))


def shuffled(**more: Any) -> RunSpec:
    return make_spec(steps=100, max_staleness=1, curate=Shuffled(ROWS, **{"group_size": 2, **more}))


def test_another_keep_drops_what_it_would_have_dropped_and_makes_fewer_steps() -> None:
    with Rig(shuffled()) as rig:
        play_all(rig, 24, odd_one_out)
        before = figures_of(rerun(rig, shuffled()))["p"]
        after = figures_of(rerun(rig, other(shuffled(), keep=(DropZeroVariance(),))))["p"]
    assert (before.groups, before.episodes, before.steps) == (24, 48, 12)
    assert before.with_signal == after.with_signal == pytest.approx(2 / 3)
    assert (before.dropped, after.dropped) == ({}, {"zero_variance": 8})
    assert (after.groups, after.steps, after.never_made) == (24, 8, 0)
    assert (before.trained_with_signal, after.trained_with_signal) == (pytest.approx(2 / 3), 1.0)
    assert (before.episodes_per_step, after.episodes_per_step) == (4.0, 6.0)
    assert (before.kept, after.kept) == (24, 16) and (before.episodes_per_kept, after.episodes_per_kept) == (2.0, 3.0)


def test_what_another_keep_masks_is_a_decision_and_shows_in_what_is_trained() -> None:
    """24 groups of 4, half of the rewards 1: PODS trains 2 of each, whether it is asked before or after."""
    spec, masks = shuffled(group_size=4), other(shuffled(group_size=4), keep=(MaxVariance(keep=2),))
    for run, asked, then, now in ((spec, masks, 96, 48), (masks, spec, 48, 96)):
        with Rig(copy.deepcopy(run)) as rig:
            play_all(rig, 24, lambda lease: float(lease.index % 2), leases=4)
            own, again = rerun(rig, copy.deepcopy(run)), rerun(rig, copy.deepcopy(asked))
            assert compared(own).same and compared(own).masks == 96 - then
            assert happened(own.record, own.spec, signals_of(own)) == figures_of(own)
            before, after = figures_of(own)["p"], figures_of(again)["p"]
            assert (before.episodes_trained, after.episodes_trained) == (then, now)
            assert before.masked == ({} if then == 96 else {"not_chosen": 48})
            assert after.masked == ({} if now == 96 else {"not_chosen": 48})
            differences = compared(again).differences
            assert len(differences) == 24
            words = ("nothing", "not_chosen 2") if now == 48 else ("not_chosen 2", "nothing")
            assert differences[0] == "group 1 for p: masks {}, now {}".format(*words)


class MasksLowest:
    """Trains only what got more than 0: nothing that differs is left."""

    def verdict(self, summary: Any, advantages: Any) -> None:
        return None

    def mask(self, summary: Any) -> dict[str, str]:
        units = summary.units
        return {name: "low" for name, reward in zip(units.sample_id, units.reward, strict=True) if reward <= 0}


def test_the_share_with_signal_of_what_is_trained_is_without_the_masked() -> None:
    with Rig(shuffled()) as rig:
        play_all(rig, 24, odd_one_out)
        found = figures_of(rerun(rig, other(shuffled(), keep=(MasksLowest(),))))["p"]
    assert (found.with_signal, found.trained_with_signal) == (pytest.approx(2 / 3), 0.0)
    assert (found.episodes_trained, found.masked) == (48 - 16, {"low": 16})


def test_another_order_of_the_same_tasks_is_known_in_full() -> None:
    with Rig(shuffled()) as rig:
        play_all(rig, 24, odd_one_out)
        again = rerun(rig, shuffled(seed=1))
        found = figures_of(again)["p"]
        assert (found.never_made, found.steps, found.with_signal) == (0, 12, pytest.approx(2 / 3))
        assert found.staleness_max is not None and found.staleness_max <= 1
        used = [slot.content for slot in again.slots.values()]
        assert len(set(used)) == 24, "each recorded group once"
        tasks_of = {group.group: group.task.key for group in again.record.groups.values()}
        assert all(tasks_of[slot.content or 0] == slot.task.key for slot in again.slots.values())
        assert not compared(again).same


def test_what_is_played_at_another_moment_is_sampled_by_that_moments_version() -> None:
    """A group of the first version, played near the end, is as fresh as the one that was played there."""
    with Rig(shuffled()) as rig:
        play_all(rig, 24, odd_one_out)
        again = rerun(rig, shuffled(seed=3))
        moved = [slot for slot in again.slots.values() if slot.content != slot.group]
        assert len(moved) > 12
        for slot in again.slots.values():
            assert slot.standings["p"].min_version == again.record.groups[slot.group].places["p"].min_version


def test_what_was_never_made_is_said_and_bounds_the_answer() -> None:
    more = tasks(24)  # the recorded tasks and as many others
    with Rig(shuffled()) as rig:
        play_all(rig, 24, odd_one_out)
        spec = other(shuffled(), curate=Shuffled(more, group_size=2), keep=(DropZeroVariance(),))
        lost = rerun(rig, copy.deepcopy(spec))
        useful = rerun(rig, copy.deepcopy(spec), unmade="useful")
    least, most = figures_of(lost)["p"], figures_of(useful)["p"]
    assert least.never_made == most.never_made == 24
    assert least.dropped[NEVER_MADE] == 12 and NEVER_MADE not in most.dropped
    assert least.steps < most.steps <= 12
    assert least.episodes == most.episodes == 48
    assert least.with_signal is not None and most.with_signal is not None
    assert least.with_signal < most.with_signal
    unmade = [slot.group for slot in lost.slots.values() if slot.content is None]
    assert all(lost.verdicts[group, "p"] == NEVER_MADE and useful.verdicts[group, "p"] == "kept" for group in unmade)


class Watching(Shuffled):
    """Remembers what it was shown."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.seen: list[str] = []

    def observe(self, summary: Any) -> None:
        self.seen.append(summary.task.key)


def test_curate_is_shown_only_what_was_made() -> None:
    with Rig(shuffled()) as rig:
        play_all(rig, 24, odd_one_out)
        curate = Watching(tasks(24), group_size=2)
        again = rerun(rig, other(shuffled(), curate=curate), unmade="useful")
    made = [slot.task.key for slot in again.slots.values() if slot.content is not None]
    assert sorted(curate.seen) == sorted(made) and 0 < len(made) < 24


@pytest.mark.parametrize(("size", "never_made"), [(1, 0), (2, 0), (3, 24 * 3)])
def test_fewer_episodes_are_a_part_of_the_group_and_more_were_never_made(size: int, never_made: int) -> None:
    with Rig(shuffled()) as rig:
        play_all(rig, 24, odd_one_out)
        found = figures_of(rerun(rig, shuffled(group_size=size)))["p"]
    assert (found.episodes, found.never_made) == (24 * size, never_made)
    assert found.with_signal == {1: 0.0, 2: pytest.approx(2 / 3), 3: None}[size]


def test_a_task_can_be_asked_for_only_as_often_as_it_was_made() -> None:
    one = ListTasks("tasks", [ROWS.task(1)])
    with Rig(shuffled()) as rig:
        play_all(rig, 24, odd_one_out)
        found = figures_of(rerun(rig, other(shuffled(), curate=Shuffled(one, group_size=2))))["p"]
    assert (found.groups, found.never_made) == (24, 22 * 2)


def test_one_that_runs_out_of_tasks_opens_fewer_groups() -> None:
    with Rig(shuffled()) as rig:
        play_all(rig, 24, odd_one_out)
        again = rerun(rig, shuffled(epochs=1))
        assert (again.without_task, figures_of(again)["p"].groups) == (12, 12)
        assert any("now no task" in each for each in compared(again).differences)


def test_fewer_kept_groups_end_later_but_batches_that_wait_are_filled() -> None:
    """A batch that could not be filled when it was asked for is filled by later groups, and its step made then."""
    with Rig(shuffled()) as rig:
        play_all(rig, 24, odd_one_out)
        again = rerun(rig, other(shuffled(), keep=(DropZeroVariance(),)))
    states = [cut.state for cut in again.cuts.values()]
    assert states == ["committed"] * 8 + ["waiting"] * 4
    assert any(not cut.same for cut in again.cuts.values() if cut.state == "committed")


def test_a_batch_without_signal_is_no_step_and_one_with_signal_is() -> None:
    with Rig(shuffled()) as rig:
        epoch = rig.resume()
        for reward in (1.0, 1.0, None, None):
            for lease in rig.leases(2):
                rig.submit(lease, float(lease.index) if reward is None else reward)
        first = rig.take(epoch)
        rig.commit(first, reason="no_signal")
        rig.commit(rig.take(epoch))
        own = rerun(rig, shuffled())
        assert compared(own).same and own.versions == {"p": 1}
        swapped = rerun(rig, other(shuffled(), select=Backwards()))
    assert [cut.state for cut in swapped.cuts.values()] == ["committed", "dropped"]
    assert swapped.cuts[2].reason == "no_signal" and swapped.versions == {"p": 1}


class Backwards:
    """The youngest first."""

    def pick(self, ready: Any, *, need: int, oldest_open: int | None) -> list[int]:
        return [group.group for group in sorted(ready, key=lambda each: -each.arrival)][:need]


def test_replaying_groups_takes_fewer_episodes_for_a_step() -> None:
    with Rig(shuffled()) as rig:
        play_all(rig, 24, odd_one_out)
        spec = other(shuffled(), keep=(DropZeroVariance(),), select=WithReplay(EarliestDeadline(), ratio=0.5))
        found = figures_of(rerun(rig, spec))["p"]
    assert found.replayed > 0 and found.steps > 8
    assert found.staleness_max is not None and found.staleness_max <= 1


# ── what is not there any more ──


@pytest.mark.parametrize("name", ["greso", "pods"])
def test_pruned_groups_are_rebuilt_from_their_scores_and_decide_the_same(name: str) -> None:
    with Rig(spec_of(name, policies=2)) as rig:
        Player(rig, 5).play(400)
        rig.db.run("DELETE FROM payloads WHERE group_id % 2 = 0")
        again = rerun(rig, spec_of(name, policies=2))
        assert compared(again).same
        assert again.record.rebuilt and all(group % 2 == 0 for group in again.record.rebuilt)


def test_supervised_groups_are_rebuilt_as_such() -> None:
    with Rig(spec_of("stages")) as rig:
        Player(rig, 1).play(300)
        rig.db.run("DELETE FROM payloads")
        again = rerun(rig, spec_of("stages"))
        assert compared(again).same and again.record.rebuilt


def test_of_several_recorded_groups_of_a_task_the_one_nearest_in_time_is_played() -> None:
    task = ROWS.task(0)

    def made(group: int, *, size: int = 2, ended: bool = True) -> RecordedGroup:
        return RecordedGroup(group=group, task=task, size=size, arrival=group if ended else None, places={})

    groups = [made(1), made(4), made(6, size=1), made(7, ended=False), made(8), made(12)]
    stock = Stock({each.group: each for each in groups})
    taken = [stock.take(task, 2, near=6) for _ in range(5)]
    assert taken == [4, 8, 1, 12, None], "of equally near ones the earlier; one too small or never ended is none"
    assert stock.take(task, 2, near=7) == 7, "at its own moment one that never ended does not end either"
    assert stock.take(task, 1, near=6) == 6
    assert stock.take(ROWS.task(1), 1, near=6) is None
