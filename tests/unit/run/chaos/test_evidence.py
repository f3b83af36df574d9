"""What the ledger claims was trained, (sample_id, use) by (sample_id, use): exactly the rows of its batches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from astraflow.algorithms.select import EarliestDeadline
from astraflow.algorithms.select_replay import WithReplay
from astraflow.run.chaos.evidence import read_claims
from astraflow.run.chaos.judge import Use, judge
from astraflow.run.layout import RunFolder
from astraflow.trainer.checkpoints import TrainedStep
from astraflow.types import Batch
from tests.unit.dataflow.rig import Rig, make_spec, manifest


def rig_in(folder: Path) -> Rig:
    select = WithReplay(EarliestDeadline(), ratio=0.5)
    return Rig(make_spec(steps=6, max_staleness=1, groups_per_batch=2, select=select), folder=folder)


def uses(batch: Batch) -> list[Use]:
    return [(row.sample_id, row.use) for row in batch.rows]


def history(*batches: Batch) -> list[TrainedStep]:
    """What a trainer writes down: the rows of its batches, which is what it was sent."""
    return [TrainedStep(step=n, batch=each.id, trained=tuple(uses(each))) for n, each in enumerate(batches, start=1)]


def of_two_ages(rig: Rig, epoch: int) -> Batch:
    """A batch with a group one of whose members is of version 0, the other of version 1, committed as version 2."""
    leases = rig.leases(2)
    spans = [(0, manifest("p").digest), rig.digest("p")]
    for lease, span in zip(leases, spans, strict=True):
        rig.submit(lease, episode=rig.episode(lease, float(lease.index), spans=[span]))
    batch = rig.take(epoch)
    rig.commit(batch)
    return batch


def test_a_replay_of_mixed_ages_claims_only_the_rows_that_it_has(tmp_path: Path) -> None:
    with rig_in(tmp_path) as rig:
        epoch = rig.resume()
        first = rig.step(epoch)
        second = of_two_ages(rig, epoch)
        rig.play_groups(1)
        third = rig.take(epoch)
        mixed = [sample_id for sample_id, use in uses(third) if use == 1]
        assert len(mixed) == 1, "the member of version 0 is too old by now, the other is not"
        rig.commit(third)
        claims = read_claims(RunFolder(tmp_path))
        assert claims.trained == {"p": frozenset((*uses(first), *uses(second), *uses(third)))}
        assert max(Counter((*uses(first), *uses(second), *uses(third))).values()) == 1
        verdict = judge({"p": history(first, second, third)}, claims)
        assert (verdict.lost, verdict.trained_twice, verdict.only_in_history) == (0, 0, 0)
        assert judge({"p": history(first, second)}, claims).lost == len(third.rows)


def test_an_undone_replay_is_no_claim_and_a_second_time_it_is_one_again(tmp_path: Path) -> None:
    with rig_in(tmp_path) as rig:
        epoch = rig.resume()
        first = rig.step(epoch)
        second = of_two_ages(rig, epoch)
        rig.play_groups(1)
        rig.commit(rig.take(epoch))
        epoch = rig.resume_at("p", 2, rig.digest_at(2), incarnation="t2").trainer_epoch
        done = frozenset((*uses(first), *uses(second)))
        assert read_claims(RunFolder(tmp_path)).trained == {"p": done}
        again = rig.take(epoch)
        rig.commit(again)
        assert read_claims(RunFolder(tmp_path)).trained == {"p": done | set(uses(again))}


def test_what_was_masked_in_its_first_use_is_never_claimed(tmp_path: Path) -> None:
    """Members of versions 0 and 2, bound 1, at version 2."""
    with rig_in(tmp_path) as rig:
        epoch = rig.resume()
        rig.step(epoch)
        rig.step(epoch)
        leases = rig.leases(2)
        for lease, span in zip(leases, [(0, manifest("p").digest), rig.digest("p")], strict=True):
            rig.submit(lease, episode=rig.episode(lease, float(lease.index), spans=[span]))
        batch = rig.take(epoch)
        old, young = (f"{lease.group}/{lease.index}/role_p/0" for lease in leases)
        assert (young, 0) in uses(batch) and (old, 0) not in uses(batch)
        rig.commit(batch)
        claimed = read_claims(RunFolder(tmp_path)).trained["p"]
        assert (young, 0) in claimed and not [use for use in claimed if use[0] == old]
