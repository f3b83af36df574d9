"""Learning ways of choosing in a real dataflow: over-sampled batches fill in fewer rounds, restarts change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from astraflow.algorithms.curate import Dots, FilterSolved, Greso, OverSampled, Prioritised, Shuffled
from astraflow.algorithms.keep import DropZeroVariance
from astraflow.algorithms.pace import BoundedStaleness
from astraflow.types import Lease
from tests.unit.dataflow.rig import Rig, make_spec, tasks

ROWS = tasks(40)


def is_flat(lease: Lease) -> bool:
    """Two of three tasks are always solved."""
    return int(lease.task.key.rpartition("-")[2]) % 3 > 0


def play_round(rig: Rig) -> int:
    """Everything that may be played at the moment, to its end; returns the episodes."""
    leases = rig.lease(500).leases
    for lease in leases:
        rig.submit(lease, 1.0 if is_flat(lease) else float(lease.index))
    return len(leases)


def rounds_and_episodes(curate: Any, pace: Any, *, steps: int) -> tuple[float, float]:
    """Per step."""
    spec = make_spec(
        steps=steps, max_staleness=0, groups_per_batch=4, curate=curate, pace=pace, keep=(DropZeroVariance(),)
    )
    rounds = episodes = 0
    with Rig(spec) as rig:
        epoch = rig.resume()
        for _ in range(steps):
            while (reply := rig.batch(epoch)).batch is None:
                episodes += play_round(rig)
                rounds += 1
            rig.commit(reply.batch)
        rig.balanced()
    return rounds / steps, episodes / steps


def test_f64_over_sampled_batches_fill_in_fewer_rounds_and_greso_needs_fewer_episodes() -> None:
    plain = rounds_and_episodes(Shuffled(ROWS, group_size=2), BoundedStaleness(), steps=30)
    greso = Greso(ROWS, group_size=2, reward_range=(0.0, 1.0))
    chosen = rounds_and_episodes(greso, BoundedStaleness(), steps=30)
    again = Greso(ROWS, group_size=2, reward_range=(0.0, 1.0))
    sampled = rounds_and_episodes(again, OverSampled(curate=again), steps=30)
    assert chosen[1] < 0.7 * plain[1], "fewer episodes for as many groups with a signal"
    assert sampled[0] < 0.7 * chosen[0], "a batch is full after fewer rounds"
    assert sampled[1] < plain[1]


MAKE: dict[str, Callable[[], Any]] = {
    "Greso": lambda: Greso(ROWS, group_size=2),
    "Dots": lambda: Dots(ROWS, group_size=2, refresh=4, rest=8),
    "Prioritised": lambda: Prioritised(ROWS, group_size=2, rest=8),
    "FilterSolved": lambda: FilterSolved(ROWS, group_size=2, probe=0.3),
}


@pytest.mark.parametrize("name", MAKE)
def test_f70_a_dataflow_that_is_restarted_chooses_what_it_would_have_chosen(name: str) -> None:
    def played(restarts: bool) -> list[str]:
        spec = make_spec(steps=100, max_staleness=0, curate=MAKE[name](), keep=(DropZeroVariance(),))
        with Rig(spec) as rig:
            epoch = rig.resume()
            for _ in range(12):
                play_round(rig)
                if (reply := rig.batch(epoch)).batch is not None:
                    rig.commit(reply.batch)
                if restarts:
                    fresh = make_spec(steps=100, max_staleness=0, curate=MAKE[name](), keep=(DropZeroVariance(),))
                    rig.restart(fresh)
            return [key for (key,) in rig.db.all("SELECT task_key FROM groups ORDER BY id")]

    assert played(True) == played(False)


def test_a_version_that_was_committed_closes_gresos_window() -> None:
    curate = Greso(ROWS, group_size=2, reward_range=(0.0, 1.0))
    with Rig(make_spec(steps=9, max_staleness=0, curate=curate, keep=(DropZeroVariance(),))) as rig:
        epoch = rig.resume()
        while (reply := rig.batch(epoch)).batch is None:
            play_round(rig)
        assert (curate.p_easy, curate.signal_share) == (0.5, 1.0)
        rig.commit(reply.batch)
        play_round(rig)
        assert curate.p_easy != 0.5 and curate.signal_share < 1.0
