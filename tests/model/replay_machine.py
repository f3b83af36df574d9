"""The same machine with replay: what was trained comes again, under every death and fault that the other one meets."""

from __future__ import annotations

from typing import Any

from astraflow.algorithms.credit import GroupMean, Whitened
from astraflow.algorithms.select import EarliestDeadline
from astraflow.algorithms.select_replay import WithReplay
from astraflow.types import Batch
from tests.model.machine import LedgerMachine
from tests.unit.dataflow.rig import make_spec, tasks

REPLAYED: list[int] = []
"""How many rows were replayed in each example that ended: a machine that never replays proves nothing."""


class ReplayMachine(LedgerMachine):
    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, Any] = {}
        """Advantages of a sample, as it was first frozen."""

    @staticmethod
    def spec() -> Any:
        plain = LedgerMachine.spec()
        return make_spec(
            steps=plain.steps,
            max_staleness=plain.policies["p"].max_staleness,
            groups_per_batch=plain.policies["p"].groups_per_batch,
            limits=plain.limits,
            source=tasks(997),
            credit=Whitened(credit=GroupMean(std=False)),
            select=WithReplay(EarliestDeadline(), ratio=0.5, order="prioritised"),
        )

    def _check_rows(self, batch: Batch) -> None:
        super()._check_rows(batch)
        for row in batch.rows:
            what = [(run.start, run.stop, run.value) for run in row.advantages]
            if row.use == 0:
                assert self.values.setdefault(row.sample_id, what) == what
            else:
                assert self.values[row.sample_id] == what, f"{row.sample_id} comes again with other advantages"

    def _drain(self) -> None:
        super()._drain()
        again = {(sample_id, use) for _, _, rows in self.trained for sample_id, use in rows if use}
        self._same_story(again)
        REPLAYED.append(len(again))

    def _same_story(self, again: set[tuple[str, int]]) -> None:
        ledger = {
            (str(group), use)
            for group, use in self.rig.db.all(
                "SELECT g.group_id, g.use FROM batch_groups g JOIN batches b ON b.id = g.batch "
                "WHERE b.state = 'committed' AND g.use > 0"
            )
        }
        trainer = {(sample_id.split("/")[0], use) for sample_id, use in again}
        assert ledger == trainer, "the ledger tells of other replays than the trainer"
