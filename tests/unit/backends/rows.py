"""Batches for backends: groups with shared prompts, mixed lengths, some rows supervised or partly masked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from astraflow.types import AdvantageRun, Array, Batch, Row, SampleKind, Span

VOCABULARY = 90


def make_row(
    tokens: Sequence[int] | Array,
    mask: Sequence[bool] | Array,
    *,
    name: str = "0/0/a/0",
    advantage: float = 1.0,
    logprob: float = -4.0,
    version: int = 0,
    supervised: bool = False,
) -> Row:
    trained = np.asarray(mask, np.bool_)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], trained.astype(np.int8), [0]])))
    pieces = [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    behaviour = np.zeros(len(trained), np.float32)
    if not supervised:
        behaviour[trained] = logprob
    return Row(
        sample_id=name,
        tokens=np.asarray(tokens, np.int32),
        mask=trained,
        logprobs=behaviour,
        spans=() if supervised else tuple(Span(start=a, stop=b, version=version, digest="d") for a, b in pieces),
        advantages=tuple(AdvantageRun(start=a, stop=b, value=1.0 if supervised else advantage) for a, b in pieces),
        kind=SampleKind.SUPERVISED if supervised else SampleKind.RL,
    )


def make_batch(
    seed: int = 0, *, version: int = 0, groups: int = 3, size: int = 4, longest: int = 12, supervised: int = 0
) -> Batch:
    """``groups`` of ``size`` answers of 1 … ``longest`` tokens behind prompts with a common beginning."""
    random = np.random.default_rng(seed)
    instruction = random.integers(7, VOCABULARY, 9)
    rows = []
    for group in range(groups):
        prompt = np.concatenate([instruction, random.integers(7, VOCABULARY, random.integers(2, 6))])
        for episode in range(size):
            answer = random.integers(7, VOCABULARY, random.integers(1, longest + 1))
            mask = np.concatenate([np.zeros(len(prompt), bool), random.random(len(answer)) < 0.9])
            mask[-1] = True
            rows.append(
                make_row(
                    np.concatenate([prompt, answer]),
                    mask,
                    name=f"{group}/{episode}/a/0",
                    advantage=float(random.normal()),
                    logprob=float(-4 - random.random()),
                    version=int(random.integers(0, version + 1)),
                    supervised=len(rows) < supervised,
                )
            )
    return of_rows(rows, version=version, number=seed + 1)


def of_rows(rows: Sequence[Row], *, version: int = 0, number: int = 1) -> Batch:
    return Batch(
        id=number,
        policy="p",
        version=version,
        trainer_epoch=1,
        tokens=sum(int(row.mask.sum()) for row in rows),
        sequences=sum(bool(row.mask.any()) for row in rows),
        rows=tuple(rows),
    )
