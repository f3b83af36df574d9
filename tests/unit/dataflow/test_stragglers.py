"""Slow episodes: which open groups are given up early, and what is opened in the stead of those that are waited for."""

from __future__ import annotations

import pytest

from astraflow.observe.waits import WaitReason
from tests.unit.dataflow.rig import Rig, make_spec, manifest


@pytest.mark.parametrize("late", [True, False])
def test_who_spoke_by_newer_weights_than_it_was_leased_by_is_expected_to_do_so_again(late: bool) -> None:
    """Bound 1. A group leased at 2 is hopeless at 4, unless groups were sampled one version after their lease: at 5."""
    with Rig(make_spec(steps=9, max_staleness=1, groups_per_batch=1)) as rig:
        epoch = rig.resume()
        first = rig.leases(2)
        rig.step(epoch)
        spoke = int(late)
        for lease in first:
            spans = [(spoke, manifest("p", spoke).digest)]
            rig.submit(lease, episode=rig.episode(lease, float(lease.index), spans=spans))
        rig.commit(rig.take(epoch))
        slow = rig.leases(2)
        found = {}
        for _ in range(3):
            rig.step(epoch)
            found[rig.digest("p")[0]] = rig.group(slow[0].group)[0]
            rig.balanced()
        assert found == {3: "open", 4: "open" if late else "stale", 5: "stale"}
        assert rig.db.counter("cancelled_groups") == 1


def test_what_was_hopeless_and_comes_all_the_same_is_trained_if_it_is_young_enough() -> None:
    """Its tool took four versions, then the policy spoke: nothing was cancelled, for it had done so before."""
    with Rig(make_spec(steps=20, max_staleness=4, groups_per_batch=1)) as rig:
        epoch = rig.resume()
        for _ in range(2):  # the first shows that it may take long, the second takes longer than the bound
            slow = rig.leases(2)
            for _ in range(4 if slow[0].group == 1 else 5):
                rig.step(epoch)
            for lease in slow:
                rig.submit(lease, float(lease.index))
            assert rig.group(slow[0].group)[0] == "kept"
            if slow[0].group == 1:
                rig.commit(rig.take(epoch))
        assert rig.db.counter("cancelled_groups") == 0


@pytest.mark.parametrize("per_batch", [1, 2])
def test_a_group_is_overtaken_once_a_whole_batch_of_younger_ones_has_closed(per_batch: int) -> None:
    with Rig(make_spec(steps=9, max_staleness=8, groups_per_batch=per_batch)) as rig:
        rig.leases(4)
        seen = []
        for _ in range(3):
            rig.play_groups(1)
            seen.append(rig.service.ledger.groups.rooms()["p"].overtaken_groups)
        assert seen == [2, 2, 2] if per_batch == 1 else [0, 2, 2]
        rig.leases(2)
        assert rig.service.ledger.groups.rooms()["p"].overtaken_groups == 2, "the youngest has not been"


def test_who_was_overtaken_is_told_without_a_look_at_what_is_over() -> None:
    """It is asked at every admission, of runs with any number of groups."""
    with Rig() as rig:
        said: list[str] = []
        rig.db.connection.set_trace_callback(said.append)
        rig.service.ledger.groups.rooms()
        rig.db.connection.set_trace_callback(None)
        (asked,) = (statement for statement in said if "OFFSET" in statement)
        plan = [row[3] for row in rig.db.all(f"EXPLAIN QUERY PLAN {asked}")]
        assert "USING INDEX groups_open" in plan[0], plan


def test_the_end_of_a_run_does_not_wait_for_its_slowest_episodes() -> None:
    with Rig(make_spec(steps=2, max_staleness=2, groups_per_batch=1)) as rig:
        epoch = rig.resume()
        slow = rig.leases(2)
        rig.step(epoch)
        rig.step(epoch)
        assert rig.service.ledger.state == "finished"
        assert rig.group(slow[0].group)[0] == "open"
        rig.balanced()


def test_as_long_as_nobody_is_overtaken_nothing_is_opened_that_no_step_needs() -> None:
    with Rig(make_spec(steps=1, max_staleness=1, groups_per_batch=2)) as rig:
        rig.leases(2)
        rig.play_groups(1)
        assert rig.lease().reason == WaitReason.NO_ROOM
