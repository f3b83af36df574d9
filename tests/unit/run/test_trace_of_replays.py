"""``astraflow trace`` of an episode whose group came again: the later batches are part of its journey."""

from __future__ import annotations

from pathlib import Path

from astraflow.algorithms.select import EarliestDeadline
from astraflow.algorithms.select_replay import WithReplay
from astraflow.run.run_db import open_run_db
from tests.unit.dataflow.rig import Rig, make_spec


def test_later_uses_are_told(tmp_path: Path) -> None:
    spec = make_spec(groups_per_batch=2, max_staleness=2, select=WithReplay(EarliestDeadline(), ratio=0.5))
    with Rig(spec, folder=tmp_path) as rig:
        epoch = rig.resume()
        rig.step(epoch)
        rig.play_groups(1)
        rig.commit(rig.take(epoch))
        with open_run_db(tmp_path / "run.db") as db:
            again = [(each["kind"], each["batch"]) for each in db.events_of(2) if each.get("batch")]
            never = [(each["kind"], each["batch"]) for each in db.events_of(1) if each.get("batch")]
    first, second = ([(kind, batch) for kind in ("cut", "issued", "committed")] for batch in (1, 2))
    assert again == [*first, *second]
    assert never == first
