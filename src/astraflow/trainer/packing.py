"""Rows that begin alike share their beginning: samples → packed rows, each a tree of tokens. Numpy only, pure.

    P a b c        P ─┬─ a ── b ── c         tokens     P a b c d x
    P a d      ⇒      │   └── d              positions  0 1 2 3 2 1
    P x               └── x                  end        6 5 4 4 5 6      (one past the last descendant)

Tokens are stored in depth-first order, so token i may attend to token j exactly if ``j <= i < end[j]``: its own
prefix and nothing else. A causal model therefore computes the same as on separate rows (F33), but the prompt of a
group, an instruction that groups share, and answers that begin alike are computed once.
A row's last trained token is only predicted, never fed. Logits are needed at few tokens ("heads"), and one head may
predict several targets: after a shared prompt, the first token of every answer.

Letters: L tokens of a packed row, M heads, N targets (trained tokens). No padding anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from astraflow.types import Array, Row, SampleKind


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRow:
    """Several rows of a batch as one row of a model's input."""

    tokens: Array
    """int64 [L]"""
    positions: Array
    """int64 [L]: place in the original row."""
    end: Array
    """int64 [L]: descendants of token j, itself included, are ``j .. end[j] - 1``."""
    head: Array
    """int64 [M]: tokens after which logits are needed."""
    head_supervised: Array
    """bool [M]: all targets of one head are of one kind (they may differ in temperature)."""
    target_head: Array
    """int64 [N]: which head predicts the target (index into ``head``)."""
    targets: Array
    """int64 [N]: the trained token."""
    logprobs: Array
    """float32 [N]: behaviour log-probs."""
    advantages: Array
    """float32 [N]"""
    rewards: Array
    """float32 [N]: those same values as something earned: at the last trained token of each run, 0 before it."""
    sequence: Array
    """int64 [N]: index of the row in the batch."""
    versions: Array
    """int64 [N]: the version that sampled the token; -1 where no version did (supervised)."""
    supervised: Array
    """bool [N]"""

    def may_attend(self) -> Array:
        """bool [L, L]: query i (first axis) sees key j."""
        index = np.arange(len(self.tokens))
        return (index[None, :] <= index[:, None]) & (index[:, None] < self.end[None, :])


def pack(rows: Sequence[Row], *, tokens_per_micro_batch: int) -> list[PackedRow]:
    """All trained tokens of ``rows`` exactly once, in packed rows of at most ``tokens_per_micro_batch`` tokens.

    A row that is longer by itself gets a packed row of its own; rows without a trained token are left out. The
    result depends on the rows and their order alone.
    """
    fed = {n: _fed(row) for n, row in enumerate(rows) if row.mask.any()}
    order = sorted(fed, key=lambda n: (fed[n].astype(">i4").tobytes(), n))  # ids are >= 0: bytes sort like numbers
    packs: list[PackedRow] = []
    tree = _Tree()
    for n in order:
        if tree.size and tree.size + tree.new_tokens(fed[n]) > tokens_per_micro_batch:
            packs.append(tree.finish())
            tree = _Tree()
        tree.add(fed[n], n, rows[n])
    if tree.size:
        packs.append(tree.finish())
    return packs


def _fed(row: Row) -> Array:
    """The tokens that predict something trained: up to, not including, the last trained one."""
    last = int(np.flatnonzero(row.mask)[-1])
    return row.tokens[:last]


def advantages_of(row: Row) -> Array:
    """float32 [T]: the runs spread over their tokens, 0 elsewhere."""
    values = np.zeros(len(row.tokens), np.float32)
    for run in row.advantages:
        values[run.start : run.stop] = run.value
    return values


def rewards_of(row: Row) -> Array:
    """float32 [T]: each run's value once, where the run ends; what data has masked earns nothing."""
    values = np.zeros(len(row.tokens), np.float32)
    for run in row.advantages:
        trained = np.flatnonzero(row.mask[run.start : run.stop])
        if len(trained):
            values[run.start + trained[-1]] = run.value
    return values


def _versions_of(row: Row) -> Array:
    """int64 [T]: -1 where no version sampled."""
    values = np.full(len(row.tokens), -1, np.int64)
    for span in row.spans:
        values[span.start : span.stop] = span.version
    return values


class _Tree:
    """Grows by rows in sorted order, so that a new row leaves the last one's path at one place."""

    def __init__(self) -> None:
        self.size = 0
        self._tokens: list[Array] = []
        self._positions: list[Array] = []
        self._path = np.zeros(0, np.int64)
        """Index in the packed row of every token of the row that was added last."""
        self._last = np.zeros(0, np.int32)
        self._paths: list[Array] = []
        self._rows: list[tuple[int, Row]] = []

    def new_tokens(self, tokens: Array) -> int:
        return len(tokens) - _common(self._last, tokens)

    def add(self, tokens: Array, n: int, row: Row) -> None:
        shared = _common(self._last, tokens)
        new = len(tokens) - shared
        self._tokens.append(tokens[shared:].astype(np.int64))
        self._positions.append(np.arange(shared, len(tokens), dtype=np.int64))
        self._path = np.concatenate([self._path[:shared], np.arange(self.size, self.size + new, dtype=np.int64)])
        self._last = tokens
        self._paths.append(self._path)
        self._rows.append((n, row))
        self.size += new

    def finish(self) -> PackedRow:
        end = np.zeros(self.size, np.int64)
        reached = 0
        for path in self._paths:  # a token ends where the last row through it ends
            reached = max(reached, int(path[-1]) + 1)
            end[path] = np.maximum(end[path], reached)
        at, target, logprob, advantage, reward, sequence, version, supervised = (
            np.concatenate(c) for c in zip(*self._columns(), strict=True)
        )
        keys, target_head = np.unique(at * 2 + supervised, return_inverse=True)
        return PackedRow(
            tokens=np.concatenate(self._tokens),
            positions=np.concatenate(self._positions),
            end=end,
            head=keys // 2,
            head_supervised=(keys % 2).astype(np.bool_),
            target_head=target_head.astype(np.int64),
            targets=target,
            logprobs=logprob,
            advantages=advantage,
            rewards=reward,
            sequence=sequence,
            versions=version,
            supervised=supervised,
        )

    def _columns(self) -> Iterator[tuple[Array, ...]]:
        for path, (n, row) in zip(self._paths, self._rows, strict=True):
            trained = np.flatnonzero(row.mask)
            yield (
                path[trained - 1],
                row.tokens[trained].astype(np.int64),
                row.logprobs[trained],
                advantages_of(row)[trained],
                rewards_of(row)[trained],
                np.full(len(trained), n, np.int64),
                _versions_of(row)[trained],
                np.full(len(trained), row.kind is SampleKind.SUPERVISED),
            )


def _common(a: Array, b: Array) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
