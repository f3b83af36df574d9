"""Which rows of a batch are of one trajectory, and in which order: what a return runs through. Numpy only, pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from astraflow.types import Array, Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectories:
    """Of the rows of one batch. A row's id is ``group/index/agent/n``: its agent's samples follow each other by n."""

    number: Array
    """int64 [rows]: which trajectory; another ``use`` of the same sample is another one."""
    rank: Array
    """int64 [rows]: place in an order in which every trajectory stands together, its samples as they were made."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Trajectories:
        names: dict[tuple[str, int], int] = {}
        number, place = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        for n, row in enumerate(rows):
            agent, _, sample = row.sample_id.rpartition("/")
            number[n] = names.setdefault((agent, row.use), len(names))
            place[n] = int(sample)
        rank = np.empty(len(rows), np.int64)
        rank[np.lexsort((place, number))] = np.arange(len(rows))
        return cls(number=number, rank=rank)
