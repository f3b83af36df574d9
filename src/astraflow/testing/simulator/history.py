"""What the simulator saw with its own eyes. It lies outside of every component, so no crash takes it away."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Mapping

from astraflow.types import Batch, Outcome
from astraflow.wire import messages as m


class History:
    """Facts that were promised to somebody; ``checks`` holds the ledger to them."""

    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()
        self.acknowledged: set[tuple[int, int]] = set()
        """(group, index) of episodes whose graded result a worker was told to be stored."""
        self.batches: dict[tuple[str, int], str] = {}
        """Content digest of every batch that was ever issued."""
        self.reissued = 0
        self.serials: dict[tuple[str, str], int] = {}
        """(reader, policy) → newest serial that it was told."""
        self.broken: list[str] = []
        """Promises that were seen to be broken while the run went on."""
        self.woken: list[float] = []
        """Logical times at which a dataflow that had been stopped for long had looked again."""
        self._log = hashlib.sha256()
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        """One line of what happened, with its virtual time: part of the history that a seed determines."""
        stamped = f"{asyncio.get_running_loop().time():.6f} {line}"
        self._log.update(stamped.encode() + b"\n")
        self.lines.append(stamped)
        if len(self.lines) > 400:
            del self.lines[:200]

    def digest(self) -> str:
        return self._log.hexdigest()

    # ── what passes through dataflow's door ──

    def submitted(self, request: m.SubmitRequest) -> None:
        if request.episode.outcome is not Outcome.FAILED:
            self.acknowledged.add((request.group, request.index))

    def issued(self, batch: Batch) -> None:
        key = (batch.policy, batch.id)
        content = batch_digest(batch)
        if key in self.batches:
            self.reissued += 1
            if self.batches[key] != content:
                self.broken.append(f"batch {batch.id} of {batch.policy} was issued again with another content")
        self.batches[key] = content

    def told_serial(self, reader: str, policy: str, serial: int, *, before: Mapping[str, int]) -> None:
        """``before``: what it had been told when it asked; of two calls at once either may be answered first."""
        if serial < before.get(policy, 0):
            self.broken.append(f"{reader} was told serial {serial} of {policy} after {before[policy]}")
        self.serials[reader, policy] = max(serial, self.serials.get((reader, policy), 0))

    def serials_of(self, reader: str) -> dict[str, int]:
        """By policy."""
        return {policy: serial for (each, policy), serial in self.serials.items() if each == reader}


def batch_digest(batch: Batch) -> str:
    """Of what is trained: not of the version that it starts from, nor of the trainer that it is issued to."""
    seen = hashlib.sha256(repr((batch.id, batch.policy, batch.tokens, batch.sequences)).encode())
    for row in batch.rows:
        seen.update(repr((row.sample_id, row.use, row.spans, row.advantages, row.kind, row.pair)).encode())
        for array in (row.tokens, row.mask, row.logprobs):
            seen.update(array.tobytes())
    return seen.hexdigest()
